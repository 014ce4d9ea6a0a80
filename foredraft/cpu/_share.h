/* Work of a number of equal items, shared out to the threads of the pool. */
#ifndef FOREDRAFT_CPU_SHARE_H
#define FOREDRAFT_CPU_SHARE_H

#include "_pool.h"

#include <stdatomic.h>
#include <stddef.h>

/* Computes items first .. end - 1; `thread` counts the threads that take part, from 0 on. */
typedef void (*Items)(const void *job, size_t first, size_t end, unsigned thread);

typedef struct {
    Items items;
    const void *job;
    size_t count, at_once;
    atomic_size_t next;
    atomic_uint threads;
} Share;

static void take_items(void *argument) {
    Share *share = argument;
    unsigned thread = atomic_fetch_add(&share->threads, 1);
    for (;;) {
        size_t first = atomic_fetch_add(&share->next, share->at_once);
        if (first >= share->count)
            return;
        size_t end = first + share->at_once;
        share->items(share->job, first, end < share->count ? end : share->count, thread);
    }
}

/* Computes all items, `at_once` at a time; by this thread alone where it is all of them. */
static inline void share_out(Items items, const void *job, size_t count, size_t at_once,
                             unsigned num_threads) {
    Share share = {.items = items, .job = job, .count = count, .at_once = at_once};
    pool_run(take_items, &share, count <= at_once ? 1 : num_threads);
}

#endif
