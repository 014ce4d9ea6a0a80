/* Meetings of processes in shared memory: each says how far it has come, and waits for the others.
 *
 * Who waits sleeps at once, since the core that it would spin on may be the one that the others
 * need. Where there are no futexes it looks now and then. */
#include "_kernels.h"

#include <limits.h>
#include <stdatomic.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define NAP_NS 50000
#define SECOND_NS 1000000000ll

/* Of one process, on a cache line of its own: the number of its newest meeting, and how many others
 * sleep until there is another one. */
typedef struct {
    _Alignas(MEETING_PLACE) atomic_uint newest;
    atomic_uint num_asleep;
} Place;

static long long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND_NS + time.tv_nsec;
}

static void sleep_while(Place *place, unsigned seen, long long ns) {
#ifdef __linux__
    struct timespec most = {ns / SECOND_NS, ns % SECOND_NS};
    syscall(SYS_futex, &place->newest, FUTEX_WAIT, seen, &most, NULL, 0);
#else
    (void)place;
    (void)seen;
    struct timespec nap = {0, ns < NAP_NS ? ns : NAP_NS};
    nanosleep(&nap, NULL);
#endif
}

static void come(Place *place, unsigned number) {
    atomic_store(&place->newest, number);
#ifdef __linux__
    if (atomic_load(&place->num_asleep))
        syscall(SYS_futex, &place->newest, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

static int is_there(unsigned newest, unsigned number) {
    return (int)(newest - number) >= 0; /* also where the numbers wrap around */
}

/* Waits for a process; returns whether it has come before `until`. */
static int wait_for(Place *place, unsigned number, long long until) {
    unsigned newest = atomic_load(&place->newest);
    if (is_there(newest, number))
        return 1;
    atomic_fetch_add(&place->num_asleep, 1);
    while (!is_there(newest = atomic_load(&place->newest), number)) {
        long long left = until - now_ns();
        if (left <= 0)
            break;
        sleep_while(place, newest, left);
    }
    atomic_fetch_sub(&place->num_asleep, 1);
    return is_there(newest, number);
}

static PyObject *meet(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    long long all[5];
    if (!read_numbers("meet", args, count, all, 5))
        return NULL;
    Place *places = (Place *)(intptr_t)all[0];
    long long rank = all[1], size = all[2], ns = all[4];
    unsigned number = (unsigned)all[3];
    if (rank < 0 || rank >= size || all[0] % MEETING_PLACE)
        return PyErr_Format(PyExc_ValueError, "no meeting of process %lld of %lld", rank, size);
    long long missing = -1;
    Py_BEGIN_ALLOW_THREADS
    come(&places[rank], number);
    long long until = now_ns() + ns;
    for (long long i = 0; i < size && missing < 0; i++)
        if (i != rank && !wait_for(&places[i], number, until))
            missing = i;
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(missing);
}

PyMethodDef meeting_methods[] = {
    {"meet", (PyCFunction)(void *)meet, METH_FASTCALL,
     "Waits for other processes; returns -1, or the first that has not come in time."},
    {NULL, NULL, 0, NULL},
};
