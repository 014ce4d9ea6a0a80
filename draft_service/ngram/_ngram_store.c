/* The trie and the contexts: inserting tokens, finding windows, forgetting the oldest. See _ngram.h. */
#include "_ngram.h"

/* ---------------------------------------------------------------- trie */

static uint32_t slot_of(const Trie *trie, uint32_t parent, uint32_t token) {
    uint64_t key = ((uint64_t)parent << 32) | token;
    key = (key ^ (key >> 31)) * 0x9E3779B97F4A7C15u;
    key = (key ^ (key >> 29)) * 0xBF58476D1CE4E5B9u;
    return (uint32_t)(key >> (64 - trie->table_bits));
}

uint32_t find_child(const Trie *trie, uint32_t parent, uint32_t token) {
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

uint32_t find_path(const Trie *trie, uint32_t scope, const uint32_t *tokens, uint32_t length) {
    uint32_t node = find_child(trie, NIL, scope);
    for (uint32_t i = 0; node != NIL && i < length; i++)
        node = find_child(trie, node, tokens[i]);
    return node;
}

/* ---------------------------------------------------------------- context */

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

uint32_t anchor_node(const Context *context, const uint32_t *end, uint32_t length) {
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

int context_extend(Context *context, const uint32_t *tokens, uint32_t num_tokens) {
    if (!context_reserve(context, (uint64_t)context->num_tokens + num_tokens)) return 0;
    for (uint32_t i = 0; i < num_tokens; i++) {
        const uint32_t *end = context->tokens + context->num_tokens;
        if (context->trie && !insert_token(context, end, context->num_tokens, tokens[i])) return 0;
        context->tokens[context->num_tokens] = tokens[i];
        chain_put(context, context->num_tokens++);
    }
    return 1;
}
