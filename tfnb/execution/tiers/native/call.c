/* One call of a package: checks of what it is given, then the step. No Python and no torch header: torch's C ABI.

   Feeds come as addresses, for their layouts are checked by who calls; Variables and constants come as tensors that
   are kept, and are looked at here, since their memory may be changed under a tensor at any time. */

#include <stddef.h>
#include <stdint.h>

typedef void *H;

enum { DONE, REFUSED, UNFIT, FAILED };

typedef struct {
    int32_t (*run)(H container, H *inputs, size_t, H *outputs, size_t, H stream, H proxy);
    int32_t (*handle)(H of, H *made);
    int32_t (*blob)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, H *, int32_t,
                    const uint8_t *, int64_t);
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
    void *found;
    if (torch->dim(tensor, &dim) || torch->sizes(tensor, &sizes) || torch->strides(tensor, &strides) ||
        torch->dtype(tensor, &dtype) || torch->device(tensor, &device) || torch->data(tensor, &found))
        return 0;
    if (dim != wanted->dim || dtype != wanted->dtype || device != 0 || (!found && wanted->bytes))
        return 0;
    for (int64_t axis = 0; axis < dim; axis++)
        if (sizes[axis] != wanted->sizes[axis] || (sizes[axis] > 1 && strides[axis] != wanted->strides[axis]))
            return 0;
    *data = found;
    return 1;
}

/* fed: for each operand its address, or NULL; kept: for the others tensors. made: room for the outputs. */
int32_t tfnb_step(const Step *step, char *const *fed, const H *kept, H *made)
{
    const Torch *torch = step->torch;
    const int64_t n = step->inputs;
    char *data[n + 1];
    H inputs[n + 1];
    for (int64_t i = 0; i < n; i++) {
        data[i] = fed[i];
        if (kept[i] && !fits(torch, &step->operands[i], kept[i], &data[i]))
            return UNFIT;
    }
    for (int64_t i = 0; i < n; i++)
        if (step->operands[i].writes)
            for (int64_t j = 0; j < n; j++)
                if (j != i && data[i] < data[j] + step->operands[j].bytes && data[j] < data[i] + step->operands[i].bytes)
                    return UNFIT;
    for (int64_t i = 0; i < n; i++) {
        const Operand *own = &step->operands[i];
        int32_t failed = kept[i] ? torch->handle(kept[i], &inputs[i])
                                 : torch->blob(data[i], own->dim, own->sizes, own->strides, 0, own->dtype, 0, 0, &inputs[i],
                                               0, NULL, 0);
        if (failed) {
            while (i--)
                torch->drop(inputs[i]);
            return FAILED;
        }
    }
    if (step->torch->run(step->container, inputs, n, made, step->outputs, NULL, NULL))
        return FAILED;
    if (step->flag) {
        char *flag;
        int32_t refused = torch->data(made[step->outputs - 1], (void **)&flag) || *flag;
        torch->drop(made[step->outputs - 1]);
        if (refused) {
            for (int64_t i = 0; i < step->outputs - 1; i++)
                torch->drop(made[i]);
            return REFUSED;
        }
    }
    return DONE;
}
