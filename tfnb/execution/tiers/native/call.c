/* One call of a package: a look at all that it is given, then the step, without Python's lock.

   By torch's C ABI and a few functions of Python's, so neither one's headers are needed. A handle is a new reference
   to a tensor; a package takes those that it is given. */

#include <stddef.h>
#include <stdint.h>

typedef void *H;
typedef void PyObject;

extern PyObject *PyList_New(ptrdiff_t), *PyList_GetItem(PyObject *, ptrdiff_t), *PyLong_FromLong(long);
extern int PyList_SetItem(PyObject *, ptrdiff_t, PyObject *);
extern PyObject *PyCapsule_New(void *, const char *, void *);
extern void *PyCapsule_GetPointer(PyObject *, const char *), *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);

enum { REFUSED = 1, UNFIT, FAILED };

typedef struct {
    int32_t (*run)(H container, H *inputs, size_t, H *outputs, size_t, H stream, H proxy);
    int32_t (*handle)(H of, H *made);
    int32_t (*drop)(H);
    int32_t (*data)(H, void **);
    int32_t (*dim)(H, int64_t *);
    int32_t (*sizes)(H, int64_t **);
    int32_t (*strides)(H, int64_t **);
    int32_t (*dtype)(H, int32_t *);
    int32_t (*device)(H, int32_t *);
} Torch;

typedef struct {
    int32_t dtype, writes;
    int64_t dim, bytes; /* bytes: from the first element to the end of the last one */
    const int64_t *sizes, *strides;
} Operand;

typedef struct {
    const Torch *torch;
    H container;
    int64_t inputs, outputs, flag; /* flag: whether the last output says that an operand was refused */
    const Operand *operands;
} Step;

static int fits(const Torch *torch, const Operand *wanted, H tensor, char **data)
{
    int64_t dim, *sizes, *strides;
    int32_t dtype, device;
    if (torch->dim(tensor, &dim) || torch->sizes(tensor, &sizes) || torch->strides(tensor, &strides) ||
        torch->dtype(tensor, &dtype) || torch->device(tensor, &device) || torch->data(tensor, (void **)data))
        return 0;
    if (dim != wanted->dim || dtype != wanted->dtype || device != 0 || (!*data && wanted->bytes))
        return 0;
    for (int64_t axis = 0; axis < dim; axis++)
        if (sizes[axis] != wanted->sizes[axis] || (sizes[axis] > 1 && strides[axis] != wanted->strides[axis]))
            return 0;
    return 1;
}

static int all_fit(const Step *step, const H *inputs)
{
    const int64_t n = step->inputs;
    char *data[n + 1], *end[n + 1];
    for (int64_t i = 0; i < n; i++) {
        if (!inputs[i] || !fits(step->torch, &step->operands[i], inputs[i], &data[i]))
            return 0;
        end[i] = data[i] + step->operands[i].bytes;
    }
    for (int64_t i = 0; i < n; i++)
        if (step->operands[i].writes)
            for (int64_t j = 0; j < n; j++)
                if (j != i && data[i] < end[j] && data[j] < end[i])
                    return 0;
    return 1;
}

static long called(const Step *step, H *inputs, H *made)
{
    char *flag;
    if (step->torch->run(step->container, inputs, step->inputs, made, step->outputs, NULL, NULL))
        return FAILED;
    if (!step->flag)
        return 0;
    const int64_t last = step->outputs - 1;
    const int refused = step->torch->data(made[last], (void **)&flag) || *flag;
    step->torch->drop(made[last]);
    for (int64_t i = 0; refused && i < last; i++)
        step->torch->drop(made[i]);
    return refused ? REFUSED : 0;
}

/* given: capsules of handles, which are used up, for each place where kept has none. A list of capsules, or a number. */
PyObject *tfnb_step(const Step *step, const H *kept, PyObject *given)
{
    const int64_t n = step->inputs;
    H inputs[n + 1], made[step->outputs + 1];
    for (int64_t i = 0, next = 0; i < n; i++)
        if (!kept[i])
            inputs[i] = PyCapsule_GetPointer(PyList_GetItem(given, next++), NULL);
        else if (step->torch->handle(kept[i], &inputs[i]))
            inputs[i] = NULL;
    long why = UNFIT;
    if (all_fit(step, inputs)) {
        void *thread = PyEval_SaveThread();
        why = called(step, inputs, made);
        PyEval_RestoreThread(thread);
    } else
        for (int64_t i = 0; i < n; i++)
            if (inputs[i])
                step->torch->drop(inputs[i]);
    if (why)
        return PyLong_FromLong(why);
    PyObject *found = PyList_New(step->outputs - step->flag);
    for (int64_t i = 0; i < step->outputs - step->flag; i++)
        PyList_SetItem(found, i, PyCapsule_New(made[i], NULL, NULL));
    return found;
}
