/* The n-gram store behind foredraft.speculation.ngram: a trie in flat arrays and a per-sequence suffix index.
 *
 * Trie: every window of `depth` consecutive tokens is a path below the root of its scope. One pool of nodes serves all
 * scopes, so one capacity bounds them. Children are found by an open-addressed table over (parent, token) and listed by
 * recency, newest first. Leaves form one list by last use; where room is needed its oldest leaf goes. A node whose last
 * child goes becomes the next to go if it was not used after that child, else the newest.
 *
 * Context: one sequence. It inserts its tokens into the trie as they come, each window once, and keeps hash chains
 * (as in LZ77) over its own tokens, through which its own text is matched without a trie of its own.
 *
 * All memory belongs to these two objects; there is no global state. Calls run under the GIL.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NIL 0u          /* node 0 is the parent of all scopes' roots and is never in a list or the table */
#define MAX_DEPTH 64
#define MAX_NODES 4096  /* of a proposal */
#define MAX_BREADTH 256
#define NUM_CHAINS 3
#define CHAIN_STEPS 64  /* own occurrences looked at per chain, newest first */
#define MAX_SCANNED 4096 /* children among which the most frequent are sought, newest first: bounds a match */
#define MAX_OWN (NUM_CHAINS * CHAIN_STEPS)

static const uint32_t chain_length[NUM_CHAINS] = {4, 2, 1};

/* ---------------------------------------------------------------- trie */

typedef struct {
    uint32_t token;
    uint32_t parent;          /* next free node while free */
    uint32_t freq;
    uint32_t stamp;           /* when it was used last; wraps, compared by difference */
    uint32_t newer, older;    /* siblings */
    uint32_t child;           /* the newest child; NIL for a leaf */
    uint32_t lru_newer, lru_older; /* among leaves */
    uint32_t generation;      /* counts what lived here, so that a stale anchor is noticed */
} Node;

typedef struct {
    PyObject_HEAD
    Node *nodes;
    uint32_t num_used, num_allocated; /* nodes[0 .. num_used) have been used at least once */
    uint32_t free_head, num_live, capacity, depth;
    uint32_t lru_newest, lru_oldest, clock;
    uint32_t *table;
    uint32_t table_bits;
} Trie;

static uint32_t slot_of(const Trie *trie, uint32_t parent, uint32_t token) {
    uint64_t key = ((uint64_t)parent << 32) | token;
    key = (key ^ (key >> 31)) * 0x9E3779B97F4A7C15u;
    key = (key ^ (key >> 29)) * 0xBF58476D1CE4E5B9u;
    return (uint32_t)(key >> (64 - trie->table_bits));
}

static uint32_t find_child(const Trie *trie, uint32_t parent, uint32_t token) {
    uint32_t mask = (1u << trie->table_bits) - 1;
    for (uint32_t slot = slot_of(trie, parent, token);; slot = (slot + 1) & mask) {
        uint32_t node = trie->table[slot];
        if (node == NIL || (trie->nodes[node].token == token && trie->nodes[node].parent == parent))
            return node;
    }
}

static void table_put(Trie *trie, uint32_t node) {
    uint32_t mask = (1u << trie->table_bits) - 1;
    uint32_t slot = slot_of(trie, trie->nodes[node].parent, trie->nodes[node].token);
    while (trie->table[slot] != NIL)
        slot = (slot + 1) & mask;
    trie->table[slot] = node;
}

static void table_remove(Trie *trie, uint32_t node) {
    uint32_t mask = (1u << trie->table_bits) - 1;
    uint32_t hole = slot_of(trie, trie->nodes[node].parent, trie->nodes[node].token);
    while (trie->table[hole] != node)
        hole = (hole + 1) & mask;
    /* Move back what would not be found across the hole. */
    for (uint32_t slot = (hole + 1) & mask; trie->table[slot] != NIL; slot = (slot + 1) & mask) {
        const Node *moved = &trie->nodes[trie->table[slot]];
        uint32_t home = slot_of(trie, moved->parent, moved->token);
        if (((slot - home) & mask) >= ((slot - hole) & mask)) {
            trie->table[hole] = trie->table[slot];
            hole = slot;
        }
    }
    trie->table[hole] = NIL;
}

static void lru_unlink(Trie *trie, uint32_t index) {
    Node *node = &trie->nodes[index];
    if (node->lru_newer) trie->nodes[node->lru_newer].lru_older = node->lru_older;
    else trie->lru_newest = node->lru_older;
    if (node->lru_older) trie->nodes[node->lru_older].lru_newer = node->lru_newer;
    else trie->lru_oldest = node->lru_newer;
}

static void lru_push_newest(Trie *trie, uint32_t index) {
    Node *node = &trie->nodes[index];
    node->lru_newer = NIL;
    node->lru_older = trie->lru_newest;
    if (trie->lru_newest) trie->nodes[trie->lru_newest].lru_newer = index;
    else trie->lru_oldest = index;
    trie->lru_newest = index;
}

static void lru_push_oldest(Trie *trie, uint32_t index) {
    Node *node = &trie->nodes[index];
    node->lru_older = NIL;
    node->lru_newer = trie->lru_oldest;
    if (trie->lru_oldest) trie->nodes[trie->lru_oldest].lru_older = index;
    else trie->lru_newest = index;
    trie->lru_oldest = index;
}

static void sibling_unlink(Trie *trie, uint32_t index) {
    Node *node = &trie->nodes[index];
    if (node->newer) trie->nodes[node->newer].older = node->older;
    else trie->nodes[node->parent].child = node->older;
    if (node->older) trie->nodes[node->older].newer = node->newer;
}

static void sibling_push(Trie *trie, uint32_t index) {
    Node *node = &trie->nodes[index], *parent = &trie->nodes[node->parent];
    node->newer = NIL;
    node->older = parent->child;
    if (parent->child) trie->nodes[parent->child].newer = index;
    parent->child = index;
}

/* Frees the least recently used leaf other than `keep`. Returns 0 if there is none. */
static int evict_leaf(Trie *trie, uint32_t keep) {
    uint32_t victim = trie->lru_oldest;
    if (victim == keep && victim != NIL) victim = trie->nodes[victim].lru_newer;
    if (victim == NIL) return 0;
    Node *node = &trie->nodes[victim];
    uint32_t parent = node->parent;
    lru_unlink(trie, victim);
    sibling_unlink(trie, victim);
    table_remove(trie, victim);
    if (parent != NIL && trie->nodes[parent].child == NIL) {
        if ((int32_t)(trie->nodes[parent].stamp - node->stamp) <= 0) lru_push_oldest(trie, parent);
        else lru_push_newest(trie, parent);
    }
    node->generation++;
    node->parent = trie->free_head;
    trie->free_head = victim;
    trie->num_live--;
    return 1;
}

/* Makes room for one more node. Returns 0 without memory. */
static int reserve_node(Trie *trie) {
    if (trie->free_head == NIL && trie->num_used == trie->num_allocated) {
        uint64_t wanted = (uint64_t)trie->num_allocated + trie->num_allocated / 4 + 256;
        if (wanted > (uint64_t)trie->capacity + 1) wanted = (uint64_t)trie->capacity + 1;
        Node *grown = realloc(trie->nodes, wanted * sizeof(Node));
        if (!grown) return 0;
        memset(grown + trie->num_allocated, 0, (wanted - trie->num_allocated) * sizeof(Node));
        trie->nodes = grown;
        trie->num_allocated = (uint32_t)wanted;
    }
    if ((uint64_t)(trie->num_live + 1) * 4 > 3ull << trie->table_bits) {
        uint32_t *grown = calloc((size_t)2 << trie->table_bits, sizeof(uint32_t));
        if (!grown) return 0;
        uint32_t *old = trie->table, old_size = 1u << trie->table_bits;
        trie->table = grown;
        trie->table_bits++;
        for (uint32_t slot = 0; slot < old_size; slot++)
            if (old[slot] != NIL) table_put(trie, old[slot]);
        free(old);
    }
    return 1;
}

/* Finds or creates a child and counts it as used. *out is NIL where there is no room. Returns 0 without memory. */
static int use_child(Trie *trie, uint32_t parent, uint32_t token, uint32_t *out) {
    uint32_t index = find_child(trie, parent, token);
    if (index != NIL) {
        Node *node = &trie->nodes[index];
        if (node->freq != UINT32_MAX) node->freq++;
        if (trie->nodes[parent].child != index) {
            sibling_unlink(trie, index);
            sibling_push(trie, index);
        }
        if (node->child == NIL && trie->lru_newest != index) {
            lru_unlink(trie, index);
            lru_push_newest(trie, index);
        }
        node->stamp = ++trie->clock;
        *out = index;
        return 1;
    }
    *out = NIL;
    if (trie->num_live >= trie->capacity && !evict_leaf(trie, parent)) return 1;
    if (!reserve_node(trie)) return 0;
    if (trie->free_head != NIL) {
        index = trie->free_head;
        trie->free_head = trie->nodes[index].parent;
    } else {
        index = trie->num_used++;
    }
    Node *node = &trie->nodes[index];
    if (parent != NIL && trie->nodes[parent].child == NIL) lru_unlink(trie, parent);
    node->token = token;
    node->parent = parent;
    node->freq = 1;
    node->child = NIL;
    node->stamp = ++trie->clock;
    sibling_push(trie, index);
    lru_push_newest(trie, index);
    table_put(trie, index);
    trie->num_live++;
    *out = index;
    return 1;
}

static uint32_t find_path(const Trie *trie, uint32_t scope, const uint32_t *tokens, uint32_t length) {
    uint32_t node = find_child(trie, NIL, scope);
    for (uint32_t i = 0; node != NIL && i < length; i++)
        node = find_child(trie, node, tokens[i]);
    return node;
}

/* ---------------------------------------------------------------- context */

typedef struct {
    uint32_t node, generation;
} Anchor;

typedef struct {
    PyObject_HEAD
    Trie *trie;
    uint32_t scope;
    Anchor anchors[MAX_DEPTH + 1]; /* [d]: the node of the last d tokens, NIL if unknown */
    uint32_t *tokens, *previous[NUM_CHAINS]; /* previous[c][i]: 1 + the position before i in its chain, 0 for none */
    uint32_t *heads[NUM_CHAINS];             /* 1 + the newest position of a chain */
    uint32_t num_tokens, num_allocated, head_bits;
} Context;

static uint32_t chain_of(const Context *context, uint32_t last, uint32_t length) {
    uint64_t key = length;
    for (uint32_t i = 0; i < length; i++)
        key = (key ^ context->tokens[last - i]) * 0x9E3779B97F4A7C15u, key ^= key >> 32;
    return (uint32_t)((key * 0xBF58476D1CE4E5B9u) >> (64 - context->head_bits));
}

static void chain_put(Context *context, uint32_t position) {
    for (int c = 0; c < NUM_CHAINS; c++) {
        context->previous[c][position] = 0;
        if (position + 1 < chain_length[c]) continue;
        uint32_t *head = &context->heads[c][chain_of(context, position, chain_length[c])];
        context->previous[c][position] = *head;
        *head = position + 1;
    }
}

static int context_reserve(Context *context, uint64_t wanted) {
    if (wanted > context->num_allocated) {
        uint64_t size = wanted + wanted / 4 + 64;
        if (size > UINT32_MAX / 2) return 0;
        uint32_t **arrays[NUM_CHAINS + 1] = {&context->tokens};
        for (int c = 0; c < NUM_CHAINS; c++) arrays[c + 1] = &context->previous[c];
        for (int i = 0; i <= NUM_CHAINS; i++) {
            uint32_t *grown = realloc(*arrays[i], size * sizeof(uint32_t));
            if (!grown) return 0;
            *arrays[i] = grown;
        }
        context->num_allocated = (uint32_t)size;
    }
    uint32_t bits = context->head_bits ? context->head_bits : 6;
    while (((uint64_t)1 << bits) < wanted) bits++;
    if (bits == context->head_bits) return 1;
    uint32_t *fresh[NUM_CHAINS];
    for (int c = 0; c < NUM_CHAINS; c++) {
        fresh[c] = calloc((size_t)1 << bits, sizeof(uint32_t));
        if (!fresh[c]) {
            while (c--) free(fresh[c]);
            return 0;
        }
    }
    for (int c = 0; c < NUM_CHAINS; c++) {
        free(context->heads[c]);
        context->heads[c] = fresh[c];
    }
    context->head_bits = bits;
    for (uint32_t i = 0; i < context->num_tokens; i++) chain_put(context, i);
    return 1;
}

static uint32_t anchor_node(const Context *context, const uint32_t *end, uint32_t length) {
    const Anchor *anchor = &context->anchors[length];
    if (anchor->node != NIL && context->trie->nodes[anchor->node].generation == anchor->generation)
        return anchor->node;
    return find_path(context->trie, context->scope, end - length, length);
}

/* Extends every window that ends at the newest token by `token`. `end` is one past the newest of `num_known` tokens. */
static int insert_token(Context *context, const uint32_t *end, uint32_t num_known, uint32_t token) {
    Trie *trie = context->trie;
    uint32_t longest = num_known + 1 < trie->depth ? num_known + 1 : trie->depth;
    for (uint32_t d = longest; d >= 1; d--) {
        uint32_t parent = anchor_node(context, end, d - 1), child = NIL;
        if (parent == NIL && d == 1 && !use_child(trie, NIL, context->scope, &parent)) return 0;
        if (parent != NIL && !use_child(trie, parent, token, &child)) return 0;
        context->anchors[d] = (Anchor){child, trie->nodes[child].generation};
        if (d == 1) context->anchors[0] = (Anchor){parent, trie->nodes[parent].generation};
    }
    return 1;
}

static int context_extend(Context *context, const uint32_t *tokens, uint32_t num_tokens) {
    if (!context_reserve(context, (uint64_t)context->num_tokens + num_tokens)) return 0;
    for (uint32_t i = 0; i < num_tokens; i++) {
        const uint32_t *end = context->tokens + context->num_tokens;
        if (context->trie && !insert_token(context, end, context->num_tokens, tokens[i])) return 0;
        context->tokens[context->num_tokens] = tokens[i];
        chain_put(context, context->num_tokens++);
    }
    return 1;
}

/* ---------------------------------------------------------------- proposals */

typedef struct {
    uint32_t min_window, max_window, depth, max_nodes, min_breadth, max_breadth;
    int by_probability;
} Rules;

typedef struct {
    uint32_t token, freq, handle;
} Child;

/* A node that may be expanded: of the trie (handle = node), or of the own text (handle = first of its occurrences). */
typedef struct {
    uint32_t out;       /* index in the proposal + 1; 0 is the root */
    uint32_t handle;
    uint32_t level;     /* own text: tokens beyond the match */
    uint32_t token;     /* by probability: not yet part of the proposal */
    uint32_t order;
    double weight;      /* breadth, or probability */
} Entry;

typedef struct {
    const Rules *rules;
    const Trie *trie;
    const uint32_t *text;       /* the own text, or NULL */
    uint32_t text_length;
    uint32_t occurrence[MAX_OWN]; /* positions of continuations, newest first */
    uint32_t match[MAX_OWN];      /* their match lengths */
    uint32_t next[MAX_OWN];       /* 1 + the next occurrence of the same node */
    uint32_t num_occurrences;
    uint32_t *tokens, *parents, *first_child, *next_sibling; /* the proposal; links are index + 1 */
    uint32_t num_nodes, num_pushed;
    Entry *queue;
    size_t queue_size, queue_allocated;
} Builder;

static int rank_before(const Child *a, const Child *b) {
    return a->freq != b->freq ? a->freq > b->freq : a->token < b->token;
}

static uint32_t keep_best(Child *children, uint32_t count, uint32_t limit, Child candidate) {
    if (count == limit && !rank_before(&candidate, &children[count - 1])) return count;
    uint32_t at = count < limit ? count++ : count - 1;
    for (; at > 0 && rank_before(&candidate, &children[at - 1]); at--) children[at] = children[at - 1];
    children[at] = candidate;
    return count;
}

static uint32_t trie_children(const Builder *b, const Entry *entry, Child *out, uint32_t limit) {
    uint32_t count = 0, scanned = 0;
    for (uint32_t i = b->trie->nodes[entry->handle].child; i != NIL && scanned < MAX_SCANNED;
         i = b->trie->nodes[i].older, scanned++) {
        const Node *node = &b->trie->nodes[i];
        Child child = {node->token, node->freq, i};
        if (b->rules->by_probability) count = keep_best(out, count, limit, child);
        else if (count < limit) out[count++] = child;
        else break;
    }
    return count;
}

/* Splits a node's occurrences by their next token. Destroys the list: each node is expanded once. */
static uint32_t own_children(Builder *b, const Entry *entry, Child *out, uint32_t limit) {
    Child groups[MAX_OWN];
    uint32_t tails[MAX_OWN], count = 0;
    for (uint32_t at = entry->handle; at != 0;) {
        uint32_t i = at - 1, position = b->occurrence[i] + entry->level, g = 0;
        at = b->next[i];
        if (position >= b->text_length) continue;
        uint32_t token = b->text[position];
        while (g < count && groups[g].token != token) g++;
        b->next[i] = 0;
        if (g == count) {
            groups[count++] = (Child){token, 1, i + 1};
        } else {
            groups[g].freq++;
            b->next[tails[g]] = i + 1;
        }
        tails[g] = i;
    }
    uint32_t kept = 0;
    for (uint32_t g = 0; g < count; g++) {
        if (b->rules->by_probability) kept = keep_best(out, kept, limit, groups[g]);
        else if (kept < limit) out[kept++] = groups[g];
    }
    return kept;
}

/* The proposal's node for a token below `out`, made if there is room. Returns 0 if there is none. */
static uint32_t merge_node(Builder *b, uint32_t out, uint32_t token) {
    for (uint32_t i = b->first_child[out]; i != 0; i = b->next_sibling[i])
        if (b->tokens[i] == token) return i;
    if (b->num_nodes == b->rules->max_nodes) return 0;
    uint32_t made = ++b->num_nodes;
    b->tokens[made] = token;
    b->parents[made] = out;
    b->first_child[made] = 0;
    b->next_sibling[made] = b->first_child[out];
    b->first_child[out] = made;
    return made;
}

static int entry_before(const Entry *a, const Entry *b) {
    return a->weight != b->weight ? a->weight > b->weight : a->order < b->order;
}

static int push(Builder *b, Entry entry) {
    if (b->queue_size == b->queue_allocated) {
        size_t wanted = b->queue_allocated * 2 + 64;
        Entry *grown = realloc(b->queue, wanted * sizeof(Entry));
        if (!grown) return 0;
        b->queue = grown;
        b->queue_allocated = wanted;
    }
    entry.order = b->num_pushed++;
    size_t at = b->queue_size++;
    if (b->rules->by_probability)
        for (; at > 0 && entry_before(&entry, &b->queue[(at - 1) / 2]); at = (at - 1) / 2)
            b->queue[at] = b->queue[(at - 1) / 2];
    b->queue[at] = entry;
    return 1;
}

static Entry pop_best(Builder *b) {
    Entry best = b->queue[0], last = b->queue[--b->queue_size];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < b->queue_size; at = child) {
        if (child + 1 < b->queue_size && entry_before(&b->queue[child + 1], &b->queue[child])) child++;
        if (!entry_before(&b->queue[child], &last)) break;
        b->queue[at] = b->queue[child];
    }
    b->queue[at] = last;
    return best;
}

/* Breadth first: a node gives its most recent children, fewer the deeper it lies and the longer the match was. */
static int grow_by_breadth(Builder *b, Entry anchor, uint32_t length, int own) {
    const Rules *rules = b->rules;
    double span = rules->depth > 2 ? rules->depth - 1 : 1;
    double slope = ((double)rules->max_breadth - rules->min_breadth) / span;
    Child children[MAX_BREADTH];
    anchor.weight = (span - length) * slope + rules->min_breadth;
    b->queue_size = 0;
    if (!push(b, anchor)) return 0;
    for (size_t head = 0; head < b->queue_size; head++) {
        Entry entry = b->queue[head];
        uint32_t limit = entry.weight >= 2 ? (uint32_t)entry.weight : 1;
        if (limit > MAX_BREADTH) limit = MAX_BREADTH;
        uint32_t count = own ? own_children(b, &entry, children, limit)
                             : trie_children(b, &entry, children, limit);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t out = merge_node(b, entry.out, children[i].token);
            if (out == 0) return 1;
            Entry next = {out, children[i].handle, entry.level + 1, 0, 0, entry.weight - slope};
            if (!push(b, next)) return 0;
        }
    }
    return 1;
}

/* Best first by the product of relative frequencies. */
static int grow_by_probability(Builder *b, Entry anchor, int own) {
    Child children[MAX_BREADTH];
    Entry entry = anchor;
    entry.weight = 1.0;
    b->queue_size = 0;
    for (;;) {
        uint32_t count = own ? own_children(b, &entry, children, b->rules->max_breadth)
                             : trie_children(b, &entry, children, b->rules->max_breadth);
        double total = 0;
        for (uint32_t i = 0; i < count; i++) total += children[i].freq;
        for (uint32_t i = 0; i < count; i++) {
            Entry next = {entry.out, children[i].handle, entry.level + 1, children[i].token, 0,
                          entry.weight * children[i].freq / total};
            if (!push(b, next)) return 0;
        }
        if (b->queue_size == 0) return 1;
        entry = pop_best(b);
        entry.out = merge_node(b, entry.out, entry.token);
        if (entry.out == 0) return 1;
    }
}

static int grow(Builder *b, uint32_t handle, uint32_t length, int own) {
    Entry anchor = {0, handle, 0, 0, 0, 0};
    return b->rules->by_probability ? grow_by_probability(b, anchor, own)
                                    : grow_by_breadth(b, anchor, length, own);
}

/* Occurrences of the text's own suffix in the text, newest first, with their match lengths. */
static void find_occurrences(Builder *b, const Context *context) {
    uint32_t n = context->num_tokens;
    const uint32_t *text = context->tokens;
    b->text = text;
    b->text_length = n;
    uint32_t longer = UINT32_MAX; /* matches of this length were seen in the chain before */
    for (int c = 0; c < NUM_CHAINS; c++) {
        if (n < chain_length[c] || b->rules->max_window < chain_length[c]) continue;
        uint32_t at = context->previous[c][n - 1];
        for (int step = 0; at != 0 && step < CHAIN_STEPS; step++, at = context->previous[c][at - 1]) {
            uint32_t length = 0;
            while (length < b->rules->max_window && length < at && text[at - 1 - length] == text[n - 1 - length])
                length++;
            if (length < chain_length[c]) continue; /* another key of this bucket */
            if (length < b->rules->min_window || length >= longer) continue;
            uint32_t i = b->num_occurrences++;
            for (; i > 0 && b->occurrence[i - 1] < at; i--) {
                b->occurrence[i] = b->occurrence[i - 1];
                b->match[i] = b->match[i - 1];
            }
            b->occurrence[i] = at;
            b->match[i] = length;
        }
        longer = chain_length[c];
    }
}

/* The list of occurrences that match at least `length` tokens; 0 for none. */
static uint32_t own_anchor(Builder *b, uint32_t length) {
    uint32_t first = 0, *link = &first;
    for (uint32_t i = 0; i < b->num_occurrences; i++) {
        if (b->match[i] < length) continue;
        *link = i + 1;
        link = &b->next[i];
    }
    *link = 0;
    return first;
}

static PyObject *to_tuple(const uint32_t *values, uint32_t count, long offset) {
    PyObject *tuple = PyTuple_New(count);
    for (uint32_t i = 0; tuple && i < count; i++) {
        PyObject *value = PyLong_FromLong((long)values[i] + offset);
        if (!value) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

/* Anchors longest first, at each length the own text before the trie. `end` is one past the newest known token. */
static PyObject *propose(const Rules *rules, const Trie *trie, uint32_t scope, const Context *context,
                         const uint32_t *end, uint32_t num_known) {
    Builder b = {.rules = rules, .trie = trie};
    uint32_t room = rules->max_nodes + 1, longest = rules->max_window, matched = 0;
    PyObject *result = NULL;
    uint32_t *memory = calloc((size_t)room * 4, sizeof(uint32_t));
    if (!memory) return PyErr_NoMemory();
    b.tokens = memory;
    b.parents = memory + room;
    b.first_child = memory + 2 * room;
    b.next_sibling = memory + 3 * room;
    if (context) find_occurrences(&b, context);
    if (longest > num_known) longest = num_known;
    for (uint32_t d = longest; d >= rules->min_window && d > 0 && b.num_nodes < rules->max_nodes; d--) {
        uint32_t own = own_anchor(&b, d);
        if (own && !grow(&b, own, d, 1)) goto no_memory;
        if (trie && d < trie->depth && b.num_nodes < rules->max_nodes) {
            uint32_t node = context ? anchor_node(context, end, d) : find_path(trie, scope, end - d, d);
            if (node != NIL && trie->nodes[node].child != NIL && !grow(&b, node, d, 0)) goto no_memory;
        }
        if (!matched && b.num_nodes) matched = d;
    }
    PyObject *tokens = to_tuple(b.tokens + 1, b.num_nodes, 0);
    PyObject *parents = to_tuple(b.parents + 1, b.num_nodes, -1);
    if (tokens && parents) result = Py_BuildValue("OOI", tokens, parents, (unsigned)matched);
    Py_XDECREF(tokens);
    Py_XDECREF(parents);
    goto done;
no_memory:
    PyErr_NoMemory();
done:
    free(b.queue);
    free(memory);
    return result;
}

/* ---------------------------------------------------------------- Python */

static int parse_token(PyObject *item, uint32_t *out) {
    if (!PyLong_Check(item) || PyBool_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "token ids must be integers");
        return 0;
    }
    int overflow = 0;
    long value = PyLong_AsLongAndOverflow(item, &overflow);
    if (overflow || value < 0 || value > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "token ids must be in [0, 2^31)");
        return 0;
    }
    *out = (uint32_t)value;
    return 1;
}

/* A malloced copy of a sequence of token ids; NULL with an exception set. */
static uint32_t *parse_tokens(PyObject *sequence, uint32_t *count) {
    PyObject *fast = PySequence_Fast(sequence, "token ids must be a sequence");
    if (!fast) return NULL;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    uint32_t *tokens = NULL;
    if (size > INT32_MAX / 2) PyErr_SetString(PyExc_ValueError, "too many tokens");
    else if (!(tokens = malloc((size ? (size_t)size : 1) * sizeof(uint32_t)))) PyErr_NoMemory();
    for (Py_ssize_t i = 0; tokens && i < size; i++) {
        if (!parse_token(PySequence_Fast_GET_ITEM(fast, i), &tokens[i])) {
            free(tokens);
            tokens = NULL;
        }
    }
    Py_DECREF(fast);
    *count = (uint32_t)size;
    return tokens;
}

static int parse_rules(Rules *rules) {
    if (rules->max_nodes > MAX_NODES) rules->max_nodes = MAX_NODES;
    if (rules->min_window < 1 || rules->max_window < rules->min_window || rules->max_window > MAX_DEPTH ||
        rules->min_breadth < 1 || rules->max_breadth < rules->min_breadth || rules->max_breadth > MAX_BREADTH) {
        PyErr_Format(PyExc_ValueError, "need 1 <= min_window <= max_window <= %d and 1 <= min_breadth <= max_breadth <= %d",
                     MAX_DEPTH, MAX_BREADTH);
        return 0;
    }
    return 1;
}

static PyObject *trie_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"capacity", "depth", NULL};
    long long capacity, depth;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LL", names, &capacity, &depth)) return NULL;
    if (capacity < 2 || capacity > INT32_MAX || depth < 2 || depth > MAX_DEPTH)
        return PyErr_Format(PyExc_ValueError, "need 2 <= capacity < 2^31 and 2 <= depth <= %d", MAX_DEPTH);
    Trie *trie = (Trie *)type->tp_alloc(type, 0);
    if (!trie) return NULL;
    trie->capacity = (uint32_t)capacity;
    trie->depth = (uint32_t)depth;
    trie->table_bits = 8;
    trie->table = calloc((size_t)1 << trie->table_bits, sizeof(uint32_t));
    trie->nodes = calloc(1, sizeof(Node));
    trie->num_used = trie->num_allocated = 1;
    if (!trie->table || !trie->nodes) {
        Py_DECREF(trie);
        return PyErr_NoMemory();
    }
    return (PyObject *)trie;
}

static void trie_dealloc(Trie *trie) {
    PyTypeObject *type = Py_TYPE(trie);
    free(trie->nodes);
    free(trie->table);
    type->tp_free(trie);
    Py_DECREF(type);
}

static PyObject *trie_match(Trie *trie, PyObject *args) {
    Rules rules = {.depth = trie->depth};
    PyObject *sequence;
    unsigned scope, count;
    if (!PyArg_ParseTuple(args, "IOIIIIIp", &scope, &sequence, &rules.max_nodes, &rules.min_window, &rules.max_window,
                          &rules.min_breadth, &rules.max_breadth, &rules.by_probability))
        return NULL;
    if (!parse_rules(&rules)) return NULL;
    uint32_t *tokens = parse_tokens(sequence, &count);
    if (!tokens) return NULL;
    PyObject *result = propose(&rules, trie, scope, NULL, tokens + count, count);
    free(tokens);
    return result;
}

static PyObject *trie_has_scope(Trie *trie, PyObject *args) {
    unsigned scope;
    if (!PyArg_ParseTuple(args, "I", &scope)) return NULL;
    return PyBool_FromLong(find_child(trie, NIL, scope) != NIL);
}

/* Depth first, children newest first: (depth, token, frequency) of every node; a scope's root has depth 0. */
static PyObject *trie_dump(Trie *trie, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    uint32_t node = trie->nodes[0].child;
    int depth = 0;
    while (list && node != NIL) {
        const Node *entry = &trie->nodes[node];
        PyObject *item = Py_BuildValue("iII", depth, entry->token, entry->freq);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
        if (entry->child != NIL) {
            node = entry->child;
            depth++;
            continue;
        }
        while (node != NIL && trie->nodes[node].older == NIL) {
            node = trie->nodes[node].parent;
            depth--;
        }
        if (node != NIL) node = trie->nodes[node].older;
    }
    return list;
}

static PyObject *trie_num_nodes(Trie *trie, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(trie->num_live);
}

static PyObject *trie_num_bytes(Trie *trie, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(trie->num_allocated * sizeof(Node) + (sizeof(uint32_t) << trie->table_bits));
}

static PyMethodDef trie_methods[] = {
    {"match", (PyCFunction)trie_match, METH_VARARGS,
     "match(scope, context, max_nodes, min_window, max_window, min_breadth, max_breadth, by_probability)"
     " -> (tokens, parents, match_length)"},
    {"has_scope", (PyCFunction)trie_has_scope, METH_VARARGS, "has_scope(scope) -> bool"},
    {"dump", (PyCFunction)trie_dump, METH_NOARGS,
     "dump() -> [(depth, token, frequency)], depth first, children newest first"},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef trie_getset[] = {
    {"num_nodes", (getter)trie_num_nodes, NULL, "Nodes in use, roots of scopes included.", NULL},
    {"num_bytes", (getter)trie_num_bytes, NULL, "Bytes allocated.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot trie_slots[] = {{Py_tp_doc, "Trie(capacity, depth)"},
                                   {Py_tp_new, trie_new},
                                   {Py_tp_dealloc, trie_dealloc},
                                   {Py_tp_methods, trie_methods},
                                   {Py_tp_getset, trie_getset},
                                   {0, NULL}};

static PyType_Spec trie_spec = {"foredraft.speculation._ngram.Trie", sizeof(Trie), 0, Py_TPFLAGS_DEFAULT, trie_slots};

typedef struct {
    PyTypeObject *trie_type;
} ModuleState;

static struct PyModuleDef module_def;

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"trie", "scope", NULL};
    PyObject *trie;
    unsigned scope;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OI", names, &trie, &scope)) return NULL;
    ModuleState *state = PyModule_GetState(PyType_GetModule(type));
    if (trie != Py_None && !PyObject_TypeCheck(trie, state->trie_type))
        return PyErr_Format(PyExc_TypeError, "trie must be a Trie or None");
    Context *context = (Context *)type->tp_alloc(type, 0);
    if (!context) return NULL;
    if (trie != Py_None) context->trie = (Trie *)Py_NewRef(trie);
    context->scope = scope;
    return (PyObject *)context;
}

static void context_dealloc(Context *context) {
    PyTypeObject *type = Py_TYPE(context);
    Py_XDECREF(context->trie);
    free(context->tokens);
    for (int c = 0; c < NUM_CHAINS; c++) {
        free(context->previous[c]);
        free(context->heads[c]);
    }
    type->tp_free(context);
    Py_DECREF(type);
}

static PyObject *context_extend_py(Context *context, PyObject *sequence) {
    uint32_t count;
    uint32_t *tokens = parse_tokens(sequence, &count);
    if (!tokens) return NULL;
    int done = context_extend(context, tokens, count);
    free(tokens);
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *context_propose_py(Context *context, PyObject *args) {
    Rules rules = {0};
    if (!PyArg_ParseTuple(args, "IIIIIIp", &rules.max_nodes, &rules.min_window, &rules.max_window, &rules.depth,
                          &rules.min_breadth, &rules.max_breadth, &rules.by_probability))
        return NULL;
    if (!parse_rules(&rules)) return NULL;
    return propose(&rules, context->trie, context->scope, context, context->tokens + context->num_tokens,
                   context->num_tokens);
}

static PyObject *context_num_bytes(Context *context, void *Py_UNUSED(closure)) {
    size_t heads = context->head_bits ? (size_t)NUM_CHAINS << context->head_bits : 0;
    return PyLong_FromSize_t(((size_t)context->num_allocated * (NUM_CHAINS + 1) + heads) * sizeof(uint32_t));
}

static PyObject *context_num_tokens(Context *context, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(context->num_tokens);
}

static PyMethodDef context_methods[] = {
    {"extend", (PyCFunction)context_extend_py, METH_O, "extend(tokens): appends to the sequence and to the trie"},
    {"propose", (PyCFunction)context_propose_py, METH_VARARGS,
     "propose(max_nodes, min_window, max_window, depth, min_breadth, max_breadth, by_probability)"
     " -> (tokens, parents, match_length)"},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef context_getset[] = {
    {"num_tokens", (getter)context_num_tokens, NULL, "Length of the sequence.", NULL},
    {"num_bytes", (getter)context_num_bytes, NULL, "Bytes allocated.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot context_slots[] = {{Py_tp_doc, "Context(trie, scope)"},
                                      {Py_tp_new, context_new},
                                      {Py_tp_dealloc, context_dealloc},
                                      {Py_tp_methods, context_methods},
                                      {Py_tp_getset, context_getset},
                                      {0, NULL}};

static PyType_Spec context_spec = {"foredraft.speculation._ngram.Context", sizeof(Context), 0, Py_TPFLAGS_DEFAULT,
                                   context_slots};

static int module_exec(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    state->trie_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &trie_spec, NULL);
    if (!state->trie_type || PyModule_AddType(module, state->trie_type) < 0) return -1;
    PyObject *type = PyType_FromModuleAndSpec(module, &context_spec, NULL);
    if (!type) return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    ModuleState *state = PyModule_GetState(module);
    Py_VISIT(state->trie_type);
    return 0;
}

static int module_clear(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    Py_CLEAR(state->trie_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                        .m_name = "foredraft.speculation._ngram",
                                        .m_doc = "A trie of token n-grams in flat arrays; see foredraft.speculation.ngram.",
                                        .m_size = sizeof(ModuleState),
                                        .m_slots = module_slots,
                                        .m_traverse = module_traverse,
                                        .m_clear = module_clear};

PyMODINIT_FUNC PyInit__ngram(void) { return PyModuleDef_Init(&module_def); }
