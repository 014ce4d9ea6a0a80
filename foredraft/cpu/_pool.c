/* One pool for the process.
 *
 * A job is open while its caller works. Threads enter an open job one by one through `door`, a
 * number of the job and of the places that are left in it; the caller closes the door when its own
 * work is done, and waits for those who entered. So a thread that wakes up too late is not waited
 * for, and a product costs at most what it costs without threads, and a signal.
 *
 * After a job a thread looks for the next one for SPIN_NS, then it sleeps: products of one step of
 * a model follow each other within that time, and between steps the core is for others. Who spins
 * yields now and then: a thread that was woken often starts on its caller's own core, where it
 * would keep the caller from working, or the other way round.
 */
#include "_pool.h"

#include "_kernels.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#define SPIN_NS 100000 /* the longest pause between products of a step, with some left over */
#define PLACES 0xffff

static struct {
    atomic_flag is_taken; /* some caller has the pool */
    _Atomic uint64_t door; /* number of the job << 16 | places left in it */
    atomic_uint num_done, num_asleep;
    atomic_int caller_sleeps;
    void (*work)(void *);
    void *argument;
    unsigned num_workers; /* of the caller that has the pool */
    pthread_mutex_t mutex; /* around the two conditions only */
    pthread_cond_t opened, finished;
} pool = {.is_taken = ATOMIC_FLAG_INIT};

static atomic_uint num_threads = 1;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + time.tv_nsec;
}

static int is_open(void) {
    return (atomic_load(&pool.door) & PLACES) != 0;
}

static int all_are_back(unsigned num_entered) {
    return atomic_load(&pool.num_done) == num_entered;
}

/* Spins until there is a job; returns 0 where it takes too long. */
static int spin_until_open(void) {
    uint64_t until = 0;
    for (unsigned round = 1;; round++) {
        if (is_open())
            return 1;
        relax();
        if (round % 64 == 0) {
            sched_yield();
            uint64_t now = now_ns();
            if (!until)
                until = now + SPIN_NS;
            else if (now >= until)
                return 0;
        }
    }
}

static void sleep_until_open(void) {
    pthread_mutex_lock(&pool.mutex);
    atomic_fetch_add(&pool.num_asleep, 1);
    while (!is_open())
        pthread_cond_wait(&pool.opened, &pool.mutex);
    atomic_fetch_sub(&pool.num_asleep, 1);
    pthread_mutex_unlock(&pool.mutex);
}

static void *serve(void *unused) {
    (void)unused;
    for (;;) {
        if (!spin_until_open())
            sleep_until_open();
        uint64_t door = atomic_load(&pool.door);
        if (!(door & PLACES) || !atomic_compare_exchange_strong(&pool.door, &door, door - 1))
            continue;
        pool.work(pool.argument);
        /* From here on the job's memory may be gone. */
        atomic_fetch_add(&pool.num_done, 1);
        if (atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_signal(&pool.finished);
            pthread_mutex_unlock(&pool.mutex);
        }
    }
    return NULL;
}

/* Starts threads up to a number; where the system gives none, the job has fewer. */
static void start_workers(unsigned wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
    while (pool.num_workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, NULL))
            break;
        pthread_detach(thread);
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void wake(unsigned num_places) {
    unsigned num_asleep = atomic_load(&pool.num_asleep);
    unsigned num_awake = pool.num_workers - (num_asleep < pool.num_workers ? num_asleep
                                                                           : pool.num_workers);
    if (num_awake >= num_places)
        return;
    pthread_mutex_lock(&pool.mutex);
    for (unsigned i = num_awake; i < num_places; i++)
        pthread_cond_signal(&pool.opened);
    pthread_mutex_unlock(&pool.mutex);
}

static void wait_for(unsigned num_entered) {
    uint64_t until = 0;
    for (unsigned round = 1; !all_are_back(num_entered); round++) {
        relax();
        if (round % 64)
            continue;
        sched_yield();
        uint64_t now = now_ns();
        if (!until)
            until = now + SPIN_NS;
        if (now < until)
            continue;
        pthread_mutex_lock(&pool.mutex);
        atomic_store(&pool.caller_sleeps, 1);
        while (!all_are_back(num_entered))
            pthread_cond_wait(&pool.finished, &pool.mutex);
        atomic_store(&pool.caller_sleeps, 0);
        pthread_mutex_unlock(&pool.mutex);
    }
}

void pool_run(void (*work)(void *), void *argument, unsigned num_threads) {
    if (num_threads > MOST_THREADS)
        num_threads = MOST_THREADS;
    if (num_threads < 2 || atomic_flag_test_and_set(&pool.is_taken)) {
        work(argument);
        return;
    }
    if (pool.num_workers < num_threads - 1)
        start_workers(num_threads - 1);
    unsigned num_places = num_threads - 1;
    if (num_places > pool.num_workers)
        num_places = pool.num_workers;
    pool.work = work;
    pool.argument = argument;
    atomic_store(&pool.num_done, 0);
    uint64_t job = (atomic_load(&pool.door) | PLACES) + 1;
    atomic_store(&pool.door, job | num_places);
    wake(num_places);
    work(argument);
    uint64_t left = atomic_exchange(&pool.door, job) & PLACES;
    wait_for(num_places - (unsigned)left);
    atomic_flag_clear(&pool.is_taken);
}

unsigned pool_num_threads(void) {
    return atomic_load(&num_threads);
}

static int reset(void) {
    pool.num_workers = 0;
    atomic_store(&pool.door, 0);
    atomic_store(&pool.num_asleep, 0);
    atomic_store(&pool.caller_sleeps, 0);
    atomic_flag_clear(&pool.is_taken);
    return pthread_mutex_init(&pool.mutex, NULL) || pthread_cond_init(&pool.opened, NULL)
                   || pthread_cond_init(&pool.finished, NULL)
               ? -1
               : 0;
}

/* A child has none of its parent's threads, whatever they were doing. */
static void after_fork(void) {
    reset();
}

int pool_init(void) {
    static int is_ready;
    if (is_ready)
        return 0;
    if (reset() < 0 || pthread_atfork(NULL, NULL, after_fork))
        return -1;
    is_ready = 1;
    return 0;
}

static PyObject *set_num_threads(PyObject *self, PyObject *number) {
    (void)self;
    long wanted = PyLong_AsLong(number);
    if (wanted == -1 && PyErr_Occurred())
        return NULL;
    if (wanted < 1 || wanted > MOST_THREADS)
        return PyErr_Format(PyExc_ValueError, "the number of threads must be 1 to %d, not %ld",
                            MOST_THREADS, wanted);
    atomic_store(&num_threads, (unsigned)wanted);
    Py_RETURN_NONE;
}

static PyObject *get_num_threads(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return PyLong_FromUnsignedLong(pool_num_threads());
}

PyMethodDef pool_methods[] = {
    {"set_num_threads", set_num_threads, METH_O, "Sets how many threads kernels use."},
    {"get_num_threads", get_num_threads, METH_NOARGS, "Returns how many threads kernels use."},
    {NULL, NULL, 0, NULL},
};
