/* Proposals: continuations of the newest tokens, out of the trie and of the sequence's own text. See _ngram.h. */
#include "_ngram.h"

#define CHAIN_STEPS 64  /* own occurrences looked at per chain, newest first */
#define MAX_SCANNED 4096 /* children among which the most frequent are sought, newest first: bounds a match */
#define MAX_OWN (NUM_CHAINS * CHAIN_STEPS)

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

int propose(const Rules *rules, const Trie *trie, uint32_t scope, const Context *context, const uint32_t *end,
            uint32_t num_known, Proposal *out) {
    Builder b = {.rules = rules, .trie = trie};
    uint32_t room = rules->max_nodes + 1, longest = rules->max_window, matched = 0;
    int done = 0;
    uint32_t *memory = calloc((size_t)room * 4, sizeof(uint32_t));
    if (!memory) return 0;
    b.tokens = memory;
    b.parents = memory + room;
    b.first_child = memory + 2 * room;
    b.next_sibling = memory + 3 * room;
    if (context) find_occurrences(&b, context);
    if (longest > num_known) longest = num_known;
    for (uint32_t d = longest; d >= rules->min_window && d > 0 && b.num_nodes < rules->max_nodes; d--) {
        uint32_t own = own_anchor(&b, d);
        if (own && !grow(&b, own, d, 1)) goto ended;
        if (trie && d < trie->depth && b.num_nodes < rules->max_nodes) {
            uint32_t node = context ? anchor_node(context, end, d) : find_path(trie, scope, end - d, d);
            if (node != NIL && trie->nodes[node].child != NIL && !grow(&b, node, d, 0)) goto ended;
        }
        if (!matched && b.num_nodes) matched = d;
    }
    *out = (Proposal){b.tokens, b.parents, b.num_nodes, matched};
    done = 1;
ended:
    free(b.queue);
    if (!done) free(memory);
    return done;
}
