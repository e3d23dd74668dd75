/* One OpenMP thread in each process: behind a node's many CPUs are this machine's few.
 *
 *     cc -O2 -shared -fPIC -o threads.so threads.c   (virtual.py does it, and names the result in each node's /etc/ld.so.preload)
 *
 * OMP_THREAD_LIMIT=1 (layer.py) gives a program one thread, but still lets it expect several. oneDNN plans the gradient of a
 * convolution for the number expected, and waits for ever for the missing ones (torch 2.13.0+cpu). */

int omp_get_max_threads(void) { return 1; }
void omp_set_num_threads(int threads) { (void)threads; }
