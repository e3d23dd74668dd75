/* Lets the processes of a virtual node see, and bind to, as many CPUs as the node has, whatever this machine has.
 *
 *     cc -O2 -shared -fPIC -o vcpu.so vcpu.c       (virtual.py does it, and names the result in the node's /etc/ld.so.preload)
 *
 * A thread's mask is the target of a symbolic link, /run/vcpu/TID.START, with START the kernel's start time of that thread:
 * made in one step, read in one step, and never a later thread's of the same number. Who has none has that of its process, or of the
 * nearest ancestor that has one, or all CPUs. The machine's own affinity is not touched. Not seen: programs without libc, and
 * threads that another thread binds. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOLDER "/run/vcpu"
#define BYTES 128 /* 1024 CPUs */

typedef struct { unsigned char bits[BYTES]; } mask;

static mask own; /* of this process's first thread, for children whose parent is gone before they look */
static int has_own;

static int self(void) { return (int)syscall(SYS_gettid); }

static int read_file(const char *path, char *text, int size) {
	int file = open(path, O_RDONLY | O_CLOEXEC), got;
	if (file < 0) return -1;
	got = (int)read(file, text, size - 1);
	close(file);
	if (got < 0) return -1;
	text[got] = 0;
	return got;
}

/* 0: this process is on no virtual node, and every call is the machine's. */
static int cpus(void) {
	static int known = -1;
	char text[16];
	if (known < 0) {
		known = read_file(FOLDER "/count", text, sizeof text) > 0 ? atoi(text) : 0;
		if (known < 0 || known > BYTES * 8) known = 0;
	}
	return known;
}

/* The link of a thread, and its process's parent; -1 where there is no such thread. */
static int locate(int id, char *link, int size, int *parent) {
	char path[48], text[1024], *rest, state;
	unsigned long long start;
	snprintf(path, sizeof path, "/proc/%d/stat", id);
	/* The name, in parentheses, may hold anything. */
	if (read_file(path, text, sizeof text) <= 0 || !(rest = strrchr(text, ')'))) return -1;
	if (sscanf(rest + 1, " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
	           &state, parent, &start) != 3) return -1;
	snprintf(link, size, FOLDER "/%d.%llu", id, start);
	return 0;
}

static int load(const char *link, mask *found) {
	char text[2 * BYTES + 1];
	ssize_t size = readlink(link, text, sizeof text - 1);
	if (size != 2 * BYTES) return -1;
	for (int i = 0; i < BYTES; i++) {
		unsigned byte;
		if (sscanf(text + 2 * i, "%2x", &byte) != 1) return -1;
		found->bits[i] = (unsigned char)byte;
	}
	return 0;
}

/* Inherited masks never replace one that was set meanwhile: slurmstepd binds its task while that begins. */
static void store(const char *link, const mask *value, int replace) {
	char text[2 * BYTES + 1], new[96];
	for (int i = 0; i < BYTES; i++) snprintf(text + 2 * i, 3, "%02x", value->bits[i]);
	if (!replace) {
		if (symlink(text, link)) { /* there is one: it holds */ }
		return;
	}
	snprintf(new, sizeof new, "%s.%d", link, self());
	if (symlink(text, new) || rename(new, link)) unlink(new);
}

static void everything(mask *found) {
	memset(found, 0, sizeof *found);
	for (int i = 0; i < cpus(); i++) found->bits[i / 8] |= (unsigned char)(1 << i % 8);
}

static int find(int id, mask *found) {
	char link[64];
	int parent, first = id;
	while (locate(id, link, sizeof link, &parent) == 0) {
		if (load(link, found) == 0) return 0;
		if (id == self() && id != getpid()) { id = getpid(); continue; }
		if (parent <= 1) break;
		id = parent;
	}
	if (id == first && locate(id, link, sizeof link, &parent)) { errno = ESRCH; return -1; }
	everything(found);
	return 0;
}

/* Take down what this process has from its parent, which may end or be bound anew. */
static void settle(void) {
	char link[64];
	int parent, saved = errno;
	if (cpus() && getpid() != 1 && locate(getpid(), link, sizeof link, &parent) == 0) {
		mask inherited;
		if (has_own) inherited = own; else if (find(getpid(), &inherited)) return;
		store(link, &inherited, 0);
		if (load(link, &own) == 0) has_own = 1;
	}
	errno = saved;
}

/* What was set from outside since then is what a child gets. */
static void refresh(void) {
	mask now;
	if (has_own && find(getpid(), &now) == 0) own = now;
}

__attribute__((constructor)) static void begin(void) {
	settle();
	pthread_atfork(refresh, NULL, settle);
}

int sched_getaffinity(pid_t id, size_t size, cpu_set_t *set) {
	mask found;
	if (!cpus()) {
		long got = syscall(SYS_sched_getaffinity, id, size, set);
		if (got < 0) return -1;
		memset((char *)set + got, 0, size - got);
		return 0;
	}
	if (size * 8 < (size_t)cpus()) { errno = EINVAL; return -1; }
	if (find(id ? id : self(), &found)) return -1;
	memset(set, 0, size);
	memcpy(set, found.bits, size < BYTES ? size : BYTES);
	return 0;
}

int sched_setaffinity(pid_t id, size_t size, const cpu_set_t *set) {
	char link[64];
	int parent, any = 0;
	mask all, wanted = {{0}};
	if (!cpus()) return (int)syscall(SYS_sched_setaffinity, id, size, set);
	if (!id) id = self();
	if (locate(id, link, sizeof link, &parent)) { errno = ESRCH; return -1; }
	memcpy(wanted.bits, set, size < BYTES ? size : BYTES);
	everything(&all);
	for (int i = 0; i < BYTES; i++) any |= wanted.bits[i] &= all.bits[i];
	if (!any) { errno = EINVAL; return -1; }
	store(link, &wanted, 1);
	if (id == getpid()) { own = wanted; has_own = 1; }
	return 0;
}

int pthread_getaffinity_np(pthread_t thread, size_t size, cpu_set_t *set) {
	(void)thread;
	return sched_getaffinity(0, size, set) ? errno : 0;
}

int pthread_setaffinity_np(pthread_t thread, size_t size, const cpu_set_t *set) {
	if (cpus() && !pthread_equal(thread, pthread_self())) return 0;
	return sched_setaffinity(0, size, set) ? errno : 0;
}

int get_nprocs(void) {
	int (*machine)(void) = (int (*)(void))dlsym(RTLD_NEXT, "get_nprocs");
	return cpus() ? cpus() : machine();
}

int get_nprocs_conf(void) { return get_nprocs(); }

long sysconf(int name) {
	static long (*machine)(int);
	if ((name == _SC_NPROCESSORS_ONLN || name == _SC_NPROCESSORS_CONF) && cpus()) return cpus();
	if (!machine) machine = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
	return machine(name);
}

int sched_getcpu(void) {
	cpu_set_t set;
	unsigned here;
	if (!cpus()) return syscall(SYS_getcpu, &here, NULL, NULL) ? -1 : (int)here;
	if (sched_getaffinity(0, sizeof set, &set)) return -1;
	for (int i = 0; i < CPU_SETSIZE; i++) if (CPU_ISSET(i, &set)) return i;
	return 0;
}
