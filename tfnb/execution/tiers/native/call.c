/* One call of a package: a look at all that it is given, then the step, without Python's lock. */

#include "call.h"

int tfnb_fits(const Torch *torch, const Operand *wanted, H tensor, char **data)
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

int tfnb_all_fit(const Step *step, const H *inputs)
{
    const int64_t n = step->inputs;
    char *data[n + 1], *end[n + 1];
    for (int64_t i = 0; i < n; i++) {
        if (!inputs[i] || !tfnb_fits(step->torch, &step->operands[i], inputs[i], &data[i]))
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

void tfnb_drop(const Step *step, const H *handles, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (handles[i])
            step->torch->drop(handles[i]);
}

/* The step itself, without Python's lock; takes the inputs. */
long tfnb_called(const Step *step, H *inputs, H *made)
{
    char *flag;
    if (step->torch->run(inputs, made, step->constants, step->count))
        return FAILED;
    if (!step->flag)
        return 0;
    const int64_t last = step->outputs - 1;
    const int refused = step->torch->data(made[last], (void **)&flag) || *flag;
    step->torch->drop(made[last]);
    if (refused)
        tfnb_drop(step, made, last);
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
    if (tfnb_all_fit(step, inputs)) {
        void *thread = PyEval_SaveThread();
        why = tfnb_called(step, inputs, made);
        PyEval_RestoreThread(thread);
    } else
        tfnb_drop(step, inputs, n);
    if (why)
        return PyLong_FromLong(why);
    PyObject *found = PyList_New(step->outputs - step->flag);
    for (int64_t i = 0; i < step->outputs - step->flag; i++)
        PyList_SetItem(found, i, PyCapsule_New(made[i], NULL, NULL));
    return found;
}
