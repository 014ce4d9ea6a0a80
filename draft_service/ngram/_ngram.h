/* The n-gram store behind draft_service.ngram.trie: a trie in flat arrays and a per-sequence suffix index.
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
#ifndef FOREDRAFT_NGRAM_H
#define FOREDRAFT_NGRAM_H

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

static const uint32_t chain_length[NUM_CHAINS] = {4, 2, 1};

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

typedef struct {
    uint32_t min_window, max_window, depth, max_nodes, min_breadth, max_breadth;
    int by_probability;
} Rules;

/* What may follow the newest tokens; parents are index + 1, 0 for the root, and before their children. */
typedef struct {
    uint32_t *tokens, *parents; /* [1 .. num_nodes]; tokens is to be freed, parents lies in the same memory */
    uint32_t num_nodes, matched; /* matched: tokens of the longest match that brought a node */
} Proposal;

/* _ngram_store.c: the trie and contexts. Functions that allocate return 0 without memory. */

/* The child of a node, or NIL. */
uint32_t find_child(const Trie *trie, uint32_t parent, uint32_t token);
/* The node of a window, or NIL. */
uint32_t find_path(const Trie *trie, uint32_t scope, const uint32_t *tokens, uint32_t length);
/* The same for the last `length` tokens of a context, which end at `end`. */
uint32_t anchor_node(const Context *context, const uint32_t *end, uint32_t length);
/* Appends tokens to a context and to its trie. */
int context_extend(Context *context, const uint32_t *tokens, uint32_t num_tokens);

/* _ngram_proposals.c: matching. */

/* Anchors longest first, at each length the own text before the trie. `end` is one past the newest known token; without a
 * context or a trie, nothing is sought there. Returns 0 without memory; else the proposal is the caller's to free. */
int propose(const Rules *rules, const Trie *trie, uint32_t scope, const Context *context, const uint32_t *end,
            uint32_t num_known, Proposal *out);

#endif
