/* Finds the slots of the keys that the rows of one sequence see; see attention/cpu.py. */
#include "_attention.h"

#include <limits.h>

typedef struct {
    const long long *values;
    Py_ssize_t count;
    Py_buffer buffer;
} Array;

typedef struct {
    Row *rows;
    Array positions, pages, tail_positions;
    const uint8_t *mask; /* [rows, tail]; NULL for causal rows */
    long long prefix_start, prefix_len, write_index, window, page_size, num_slots;
    long long *slots, used, capacity;
} Span;

/* Appends the slots of keys first .. end - 1. Returns 0 with an exception set where they have
 * none. */
static int add_slots(Span *span, long long first, long long end) {
    for (long long key = first; key < end;) {
        long long page = key / span->page_size, offset = key % span->page_size;
        if (page >= span->pages.count) {
            PyErr_Format(PyExc_ValueError, "%zd pages of %lld do not hold %lld keys",
                         span->pages.count, span->page_size, end);
            return 0;
        }
        if (span->pages.values[page] < 0
            || span->pages.values[page] >= span->num_slots / span->page_size) {
            PyErr_Format(PyExc_ValueError,
                         "a page table names a page outside the cache of %lld slots",
                         span->num_slots);
            return 0;
        }
        long long start = span->pages.values[page] * span->page_size;
        long long number = span->page_size - offset < end - key ? span->page_size - offset
                                                                 : end - key;
        if (span->used + number > span->capacity) {
            PyErr_SetString(PyExc_ValueError, "plan_keys: no room for the slots");
            return 0;
        }
        for (long long i = 0; i < number; i++)
            span->slots[span->used++] = start + offset + i;
        key += number;
    }
    return 1;
}

/* The first key before the tail that a row sees; the tail's first where it sees none. */
static long long first_key(const Span *span, Py_ssize_t row) {
    long long first = span->prefix_start;
    if (span->window && span->positions.values[row] - span->window + 1 > first)
        first = span->positions.values[row] - span->window + 1;
    return first < span->prefix_len ? first : span->prefix_len;
}

/* Causal rows: the tail is a sequel of what is before it. */
static int plan_chunk(Span *span) {
    long long begin = LLONG_MAX, num_keys = span->write_index + span->positions.count;
    for (Py_ssize_t i = 0; i < span->positions.count; i++) {
        Row *row = span->rows + i;
        long long end = span->prefix_len + i + 1, oldest = span->positions.values[i] - span->window;
        row->begin = span->window && oldest >= span->prefix_start ? oldest + 1 : span->prefix_start;
        row->begin = row->begin < end ? row->begin : end;
        row->end = end;
        begin = row->begin < begin ? row->begin : begin;
    }
    begin = begin / BLOCK * BLOCK;
    for (Py_ssize_t i = 0; i < span->positions.count; i++) {
        span->rows[i].own_from = LLONG_MAX;
        span->rows[i].shared = span->used - begin;
        span->rows[i].own = 0;
    }
    return add_slots(span, begin, num_keys);
}

/* A row's own keys: those of the tail that its mask has, after the last few before the tail. */
static int plan_masked_row(Span *span, Py_ssize_t index, long long own_from) {
    Row *row = span->rows + index;
    const long long tail = span->write_index + span->positions.count - span->prefix_len;
    long long number = span->prefix_len;
    row->begin = first_key(span, index);
    row->own_from = own_from;
    row->own = span->used;
    if (!add_slots(span, own_from, span->prefix_len))
        return 0;
    for (long long i = 0; i < tail; i++) {
        if (span->mask ? !span->mask[index * tail + i] : i > index)
            continue;
        long long position = span->tail_positions.values ? span->tail_positions.values[i]
                                                         : span->prefix_len + i;
        if (span->window && position <= span->positions.values[index] - span->window) {
            if (row->begin < number)
                continue; /* an older key is seen, so this one gets no number */
            row->begin = number + 1;
        }
        if (!add_slots(span, span->prefix_len + i, span->prefix_len + i + 1))
            return 0;
        number++;
    }
    row->end = number;
    return 1;
}

static int plan_masked(Span *span) {
    const long long own_from = span->prefix_len / BLOCK * BLOCK;
    long long begin = own_from;
    for (Py_ssize_t i = 0; i < span->positions.count; i++)
        begin = first_key(span, i) < begin ? first_key(span, i) : begin;
    begin = begin / BLOCK * BLOCK;
    long long shared = span->used - begin;
    if (!add_slots(span, begin, own_from))
        return 0;
    for (Py_ssize_t i = 0; i < span->positions.count; i++) {
        span->rows[i].shared = shared;
        if (!plan_masked_row(span, i, own_from))
            return 0;
    }
    return 1;
}

static int open_array(PyObject *object, Array *array) {
    if (object == Py_None)
        return 1;
    if (PyObject_GetBuffer(object, &array->buffer, PyBUF_FORMAT) < 0)
        return 0;
    array->values = array->buffer.buf;
    array->count = array->buffer.len / sizeof(long long);
    const char *format = array->buffer.format;
    if ((*format == 'l' || *format == 'q') && !format[1] && array->buffer.itemsize == 8)
        return 1;
    PyErr_Format(PyExc_ValueError, "plan_keys: numbers of type %s instead of int64", format);
    return 0;
}

static void close_array(Array *array) {
    PyBuffer_Release(&array->buffer); /* does nothing for one that is not open */
}

/* Whether the tail is as long as its positions are many, and begins with the rows where no mask
 * says what they see of it; else an exception is set. */
static int fits(const Span *span) {
    const long long before = span->write_index - span->prefix_len;
    const long long tail = before + span->positions.count;
    if (span->prefix_start >= 0 && span->prefix_len >= 0 && before >= 0 && (span->mask || !before)
        && (!span->tail_positions.values || span->tail_positions.count == tail))
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "plan_keys: %zd rows from %lld on do not fit the keys %lld to %lld before them",
                 span->positions.count, span->write_index, span->prefix_start, span->prefix_len);
    return 0;
}

PyObject *plan_keys(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    long long n[11];
    if (count != 14)
        return PyErr_Format(PyExc_TypeError, "plan_keys takes 14 arguments, not %zd", count);
    if (!read_numbers("plan_keys", args + 3, 11, n, 11))
        return NULL;
    if (n[9] < 1)
        return PyErr_Format(PyExc_ValueError, "plan_keys: pages of %lld", n[9]);
    Span span = {
        .rows = (Row *)n[0],
        .slots = (long long *)n[1],
        .used = n[2],
        .capacity = n[3],
        .mask = (const uint8_t *)n[4],
        .prefix_start = n[5],
        .prefix_len = n[6],
        .write_index = n[7],
        .window = n[8],
        .page_size = n[9],
        .num_slots = n[10],
    };
    int is_planned = 0;
    if (open_array(args[0], &span.positions) && open_array(args[1], &span.pages)
        && open_array(args[2], &span.tail_positions) && fits(&span))
        is_planned = span.mask || span.tail_positions.values ? plan_masked(&span)
                                                             : plan_chunk(&span);
    close_array(&span.positions);
    close_array(&span.pages);
    close_array(&span.tail_positions);
    return is_planned ? PyLong_FromLongLong(span.used) : NULL;
}
