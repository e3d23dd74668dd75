"""The address book that horovodrun serves: what is put under a name is there from then on, for all who ask."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RendezvousHandler(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.server.book[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, b"")

    def do_GET(self):
        known = self.path in self.server.book
        self.answer(200 if known else 404, self.server.book.get(self.path, b""))

    def answer(self, code: int, text: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class RendezvousHTTPServer(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], verbose: int):
        super().__init__(address, handler)
        self.book: dict[str, bytes] = {}
