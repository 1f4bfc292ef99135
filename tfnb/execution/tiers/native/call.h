/* What a call of a package is made of: torch's C ABI, a few functions of Python's, and the step that is called.

   By hand, so neither one's headers are needed. A handle is a new reference to a tensor; a package takes those that it
   is given. A tensor of C++ is one pointer, so the address of a pointer to what is behind it is a handle that is lent. */

#include <stddef.h>
#include <stdint.h>

typedef void *H;
typedef void PyObject;

enum { REFUSED = 1, UNFIT, FAILED };

typedef struct {
    int32_t (*run)(H *inputs, H *outputs, const H *constants, int64_t);
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
    const H *constants; /* `count` tensors that the compiler made of the step: lent */
    int64_t inputs, outputs, flag, count; /* flag: whether the last output says that an operand was refused */
    const Operand *operands;
} Step;

int tfnb_fits(const Torch *, const Operand *wanted, H tensor, char **data);
int tfnb_all_fit(const Step *, const H *inputs);
long tfnb_called(const Step *, H *inputs, H *made);
void tfnb_drop(const Step *, const H *handles, int64_t count);

extern PyObject *PyCapsule_New(void *, const char *, void *), *PyLong_FromLong(long), *PyList_New(ptrdiff_t),
    *PyList_GetItem(PyObject *, ptrdiff_t);
extern int PyList_SetItem(PyObject *, ptrdiff_t, PyObject *);
extern void *PyCapsule_GetPointer(PyObject *, const char *), *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
