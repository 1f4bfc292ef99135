/* A step from the values that are fed to the values that are fetched, in one call from Python.

   As `Session` does it, for a step that nothing is in the way of: the feeds are what the package was compiled for, each
   Variable is the tensor that it was, no other step is going on. Otherwise it gives None and did nothing, and the
   session goes its longer way, which says what is wrong. An error of Python's is one that it would meet, too. From the look at the locks to the step itself nothing gives
   Python's lock away, so no other thread comes between. */

#include "call.h"

extern PyObject *PyObject_Type(PyObject *), *PyObject_GetAttr(PyObject *, PyObject *),
    *PyObject_GenericGetAttr(PyObject *, PyObject *), *PyWeakref_GetObject(PyObject *), *PyObject_CallNoArgs(PyObject *),
    *PyObject_CallOneArg(PyObject *, PyObject *), *PyDict_GetItem(PyObject *, PyObject *), *PyTuple_GetItem(PyObject *, ptrdiff_t), *PyErr_Occurred(void),
    *PyLong_FromUnsignedLong(unsigned long), *PyCFunction_NewEx(void *, PyObject *, PyObject *);
extern ptrdiff_t PyTuple_Size(PyObject *), PyList_Size(PyObject *);
extern long PyLong_AsLong(PyObject *);
extern unsigned long PyThread_get_thread_ident(void);
extern int PyObject_SetAttr(PyObject *, PyObject *, PyObject *), PyObject_IsTrue(PyObject *),
    PyList_Append(PyObject *, PyObject *), PyList_SetSlice(PyObject *, ptrdiff_t, ptrdiff_t, PyObject *);
extern void Py_IncRef(PyObject *), Py_DecRef(PyObject *);

/* What a tuple of Python's holds, in this order: see `direct.py`. */
enum { STEP, KEPT, MEMORY, WRITTEN, CLASS, WATCHES, LOCK, FETCHED, NAMES, CONSTANTS };
enum { REFERENCE, PLACES, FIND, FOUND };                 /* of a watch */
enum { MODULE, TABLE, KEY };                             /* of a place */
enum { HOLDS, HOLD, ACQUIRE, RELEASE, WAITERS, WAKE };   /* of the lock */
enum { TOKEN, LOCKED, THREAD, REQUIRES_GRAD };           /* of the names */
enum { NONE, FALSE };                                    /* of the constants */

typedef struct {
    int64_t tensor, keys, gradient; /* numbers of words: of a Python object, of what is behind it, of that, or -1 */
    uint64_t plain;                 /* the keys of a tensor on the CPU that is nothing but its numbers */
    PyObject *(*wrap)(H);           /* the tensor of Python's */
    const int64_t *changes;         /* how often something changed that no watch sees */
    int64_t known;                  /* what that was */
} Memory;

#define AT PyTuple_GetItem

static PyObject *nothing(PyObject *self)
{
    PyObject *none = AT(AT(self, CONSTANTS), NONE);
    if (PyErr_Occurred())
        return NULL;
    Py_IncRef(none);
    return none;
}

static int is_true(PyObject *answer) /* takes the answer */
{
    const int found = answer ? PyObject_IsTrue(answer) : -1;
    if (answer)
        Py_DecRef(answer);
    return found;
}

static void *word(const void *at, int64_t place) { return ((void **)at)[place]; }

/* What is behind a tensor of Python's; NULL where that is not a plain tensor on the CPU without a gradient. */
static void *plain(PyObject *self, const Memory *memory, PyObject *value)
{
    PyObject *class = PyObject_Type(value);
    Py_DecRef(class); /* the value has it, too */
    if (class != AT(self, CLASS))
        return NULL;
    void *tensor = word(value, memory->tensor);
    if ((uint64_t)(uintptr_t)word(tensor, memory->keys) != memory->plain)
        return NULL;
    if (memory->gradient >= 0 && !word(tensor, memory->gradient))
        return tensor;
    return is_true(PyObject_GetAttr(value, AT(AT(self, NAMES), REQUIRES_GRAD))) == 0 ? tensor : NULL;
}

/* The table of a module that was looked at last: as a rule the next Variable stands in the same one. */
typedef struct {
    PyObject *module, *name, *table;
} Table;

/* Whether a module has a tensor in its place. Nothing of Python's runs here, so what is borrowed stays. */
static int has(PyObject *place, PyObject *tensor, PyObject *none, Table *last)
{
    if (last->module != AT(place, MODULE) || last->name != AT(place, TABLE)) {
        PyObject *module = PyWeakref_GetObject(AT(place, MODULE));
        PyObject *table = module && module != none ? PyObject_GenericGetAttr(module, AT(place, TABLE)) : NULL;
        if (!table)
            return 0;
        Py_DecRef(table); /* the module has it, too */
        *last = (Table){AT(place, MODULE), AT(place, TABLE), table};
    }
    return PyDict_GetItem(last->table, AT(place, KEY)) == tensor;
}

/* Whether a Variable is the tensor that it was, in the place in memory where that was. */
static int is_same(PyObject *self, const Step *step, const Memory *memory, PyObject *watch, const Operand *operand,
                   H kept, Table *last)
{
    PyObject *none = AT(AT(self, CONSTANTS), NONE), *find = AT(watch, FIND), *reference = AT(watch, REFERENCE);
    char *data, *was;
    if (find != none) {
        PyObject *found = PyObject_CallNoArgs(find);
        *last = (Table){NULL, NULL, NULL};
        if (found)
            Py_DecRef(found); /* the watch has it, if it is the same */
        return found && found == AT(watch, FOUND);
    }
    if (reference == none)
        return 1;
    PyObject *tensor = PyWeakref_GetObject(reference), *places = AT(watch, PLACES);
    if (!tensor || tensor == none)
        return 0;
    void *behind = word(tensor, memory->tensor);
    if (!tfnb_fits(step->torch, operand, &behind, &data) || step->torch->data(kept, (void **)&was) || data != was)
        return 0;
    for (ptrdiff_t i = 0, n = PyTuple_Size(places); i < n; i++)
        if (!has(AT(places, i), tensor, none, last))
            return 0;
    return 1;
}

/* What a method without arguments says. */
static int says(PyObject *object, PyObject *name)
{
    PyObject *method = object ? PyObject_GetAttr(object, name) : NULL;
    const int found = method ? is_true(PyObject_CallNoArgs(method)) : -1;
    if (method)
        Py_DecRef(method);
    return found;
}

/* Take the locks if no step is going on. */
static int take(PyObject *self)
{
    PyObject *lock = AT(self, LOCK), *holds = AT(lock, HOLDS), *names = AT(self, NAMES);
    const ptrdiff_t n = PyList_Size(holds);
    int free = 1;
    for (ptrdiff_t i = 0; free && i < n; i++) {
        PyObject *token = PyObject_GetAttr(PyList_GetItem(holds, i), AT(names, TOKEN));
        free = says(token, AT(names, LOCKED)) == 0;
        if (token)
            Py_DecRef(token);
    }
    PyObject *thread = free ? PyLong_FromUnsignedLong(PyThread_get_thread_ident()) : NULL;
    if (thread && is_true(PyObject_CallOneArg(AT(lock, ACQUIRE), AT(AT(self, CONSTANTS), FALSE))) == 1) {
        PyObject_SetAttr(AT(lock, HOLD), AT(names, THREAD), thread); /* not before: it may be another one's */
        PyList_SetSlice(holds, 0, n, NULL);                          /* those that were left */
        PyList_Append(holds, AT(lock, HOLD));
    } else
        free = 0;
    if (thread)
        Py_DecRef(thread);
    return free;
}

/* Leave the locks, and wake who waits; 0, or -1 with an error of Python's. */
static int leave(PyObject *self)
{
    PyObject *lock = AT(self, LOCK), *holds = AT(lock, HOLDS);
    PyObject *released = PyObject_CallNoArgs(AT(lock, RELEASE));
    if (released)
        Py_DecRef(released);
    if (PyList_Size(holds) == 1 && PyList_GetItem(holds, 0) == AT(lock, HOLD)) /* else somebody may be looking at it */
        PyList_SetSlice(holds, 0, 1, NULL);
    if (!PyList_Size(AT(lock, WAITERS)))
        return released ? 0 : -1;
    PyObject *woken = PyObject_CallNoArgs(AT(lock, WAKE));
    if (woken)
        Py_DecRef(woken);
    return woken && released ? 0 : -1;
}

/* The fetched values as a list; takes the handles. */
static PyObject *results(PyObject *self, const Step *step, const Memory *memory, H *made)
{
    const int64_t n = step->outputs - step->flag;
    PyObject *found[n + 1], *fetched = AT(self, FETCHED), *none = AT(AT(self, CONSTANTS), NONE);
    const ptrdiff_t wanted = PyTuple_Size(fetched);
    PyObject *list = PyList_New(wanted);
    for (int64_t i = 0; i < n; i++)
        if (!(found[i] = memory->wrap(made[i])) && list) {
            Py_DecRef(list);
            list = NULL;
        }
    for (ptrdiff_t i = 0; list && i < wanted; i++) {
        PyObject *place = AT(fetched, i), *value = place == none ? none : found[PyLong_AsLong(place)];
        Py_IncRef(value);
        PyList_SetItem(list, i, value);
    }
    for (int64_t i = 0; i < n; i++)
        if (found[i])
            Py_DecRef(found[i]);
    tfnb_drop(step, made, n);
    return list;
}

static PyObject *call(PyObject *self, PyObject *const *values, ptrdiff_t given)
{
    const Step *step = PyCapsule_GetPointer(AT(self, STEP), NULL);
    const H *kept = PyCapsule_GetPointer(AT(self, KEPT), NULL);
    const Memory *memory = PyCapsule_GetPointer(AT(self, MEMORY), NULL);
    PyObject *watches = AT(self, WATCHES);
    const int64_t n = step->inputs;
    const ptrdiff_t variables = PyTuple_Size(watches);
    H inputs[n + 1], made[step->outputs + 1];
    void *behind[given + 1];
    if (*memory->changes != memory->known || given > n || (given < n && !kept[given]) || (given && kept[given - 1]))
        return nothing(self);
    for (ptrdiff_t i = 0; i < given; i++)
        if (!(behind[i] = plain(self, memory, values[i])))
            return nothing(self);
    Table last = {NULL, NULL, NULL};
    for (ptrdiff_t i = 0; i < variables; i++)
        if (!is_same(self, step, memory, AT(watches, i), &step->operands[given + i], kept[given + i], &last))
            return nothing(self);
    if (!take(self))
        return nothing(self);
    for (int64_t i = 0; i < n; i++)
        if (step->torch->handle(i < given ? &behind[i] : kept[i], &inputs[i]))
            inputs[i] = NULL;
    long why = UNFIT;
    if (tfnb_all_fit(step, inputs)) {
        for (int64_t **written = PyCapsule_GetPointer(AT(self, WRITTEN), NULL); *written; written++)
            ++**written; /* first: an interrupt may come right after the call */
        void *thread = PyEval_SaveThread();
        why = tfnb_called(step, inputs, made);
        PyEval_RestoreThread(thread);
    } else
        tfnb_drop(step, inputs, n);
    const int left = leave(self);
    if (why)
        return left ? NULL : nothing(self);
    PyObject *found = results(self, step, memory, made);
    if (left && found) {
        Py_DecRef(found);
        return NULL;
    }
    return found;
}

static struct {
    const char *name;
    void *function;
    int flags;
    const char *doc;
} METHOD = {"step", call, 0x80 /* METH_FASTCALL */, NULL};

/* A function of the fed values, which gives the fetched ones in a list, or None; self: the tuple. */
PyObject *tfnb_direct(PyObject *self) { return PyCFunction_NewEx(&METHOD, self, NULL); }
