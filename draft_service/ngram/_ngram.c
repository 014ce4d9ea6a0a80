/* The store as Python's types Trie and Context. See _ngram.h. */
#include "_ngram.h"

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

static PyObject *to_tuple(const uint32_t *values, uint32_t count, long offset) {
    PyObject *tuple = PyTuple_New(count);
    for (uint32_t i = 0; tuple && i < count; i++) {
        PyObject *value = PyLong_FromLong((long)values[i] + offset);
        if (!value) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

/* (tokens, parents, match length), where a parent of -1 is the root. */
static PyObject *proposal(const Rules *rules, const Trie *trie, uint32_t scope, const Context *context,
                          const uint32_t *end, uint32_t num_known) {
    Proposal found;
    if (!propose(rules, trie, scope, context, end, num_known, &found)) return PyErr_NoMemory();
    PyObject *tokens = to_tuple(found.tokens + 1, found.num_nodes, 0), *result = NULL;
    PyObject *parents = to_tuple(found.parents + 1, found.num_nodes, -1);
    if (tokens && parents) result = Py_BuildValue("OOI", tokens, parents, (unsigned)found.matched);
    Py_XDECREF(tokens);
    Py_XDECREF(parents);
    free(found.tokens);
    return result;
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
    PyObject *result = proposal(&rules, trie, scope, NULL, tokens + count, count);
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

static PyType_Spec trie_spec = {"draft_service.ngram._ngram.Trie", sizeof(Trie), 0, Py_TPFLAGS_DEFAULT, trie_slots};

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
    return proposal(&rules, context->trie, context->scope, context, context->tokens + context->num_tokens,
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

static PyType_Spec context_spec = {"draft_service.ngram._ngram.Context", sizeof(Context), 0, Py_TPFLAGS_DEFAULT,
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
                                        .m_name = "draft_service.ngram._ngram",
                                        .m_doc = "A trie of token n-grams in flat arrays; see draft_service.ngram.trie.",
                                        .m_size = sizeof(ModuleState),
                                        .m_slots = module_slots,
                                        .m_traverse = module_traverse,
                                        .m_clear = module_clear};

PyMODINIT_FUNC PyInit__ngram(void) { return PyModuleDef_Init(&module_def); }
