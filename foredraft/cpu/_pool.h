/* Threads that compute beside the caller. */
#ifndef FOREDRAFT_CPU_POOL_H
#define FOREDRAFT_CPU_POOL_H

#define MOST_THREADS 256

/* Calls `work(argument)` in this thread and in at most `num_threads` - 1 others at once; returns
 * when all are back. `work` must share its work out by a counter of its own (C11 atomics), until
 * there is none: other threads may come late or not at all, for instance because a job of another
 * caller has them. Not from within `work`. Hold no GIL. */
void pool_run(void (*work)(void *), void *argument, unsigned num_threads);

/* The number of threads that jobs should use, which Python sets; 1 until then. */
unsigned pool_num_threads(void);

/* Once, when the module is loaded; -1 where memory is short. */
int pool_init(void);

#endif
