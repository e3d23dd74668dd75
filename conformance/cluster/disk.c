/* A slow file system: fsync and fdatasync last the seconds that /run/cluster/fsync holds, where there is such a file.
 *
 *     cc -O2 -shared -fPIC -o disk.so disk.c -ldl   (virtual.py does it, and names the result in the node's /etc/ld.so.preload)
 *
 * Without a processor's work: so a training can last as long as a test needs it, and a save longer than a job has. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <time.h>

static void wait_as_told(void) {
	double seconds = 0;
	FILE *told = fopen("/run/cluster/fsync", "re");
	if (!told) return;
	if (fscanf(told, "%lf", &seconds) != 1) seconds = 0;
	fclose(told);
	struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
	while (nanosleep(&left, &left) < 0 && errno == EINTR) {}
}

static int slowly(const char *name, int file) {
	int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
	wait_as_told();
	return real(file);
}

int fsync(int file) { return slowly("fsync", file); }
int fdatasync(int file) { return slowly("fdatasync", file); }
