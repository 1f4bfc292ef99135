/* What the generated code of a step stands on: precompiled once for each machine, and included ahead of it.

   AOTInductor puts a whole container of models around the code of one step, with the constants' table, a pool and a
   parser of device names, which take a C++ compiler longer than the step does. The class here has the names that the
   generated code uses, and no more. */

#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/inductor/cpp_prefix.h>

#include <c10/util/generic_math.h>
#include <torch/csrc/inductor/aoti_runtime/device_utils.h>
#include <torch/csrc/inductor/aoti_runtime/scalar_to_tensor.h>
#include <torch/csrc/inductor/aoti_runtime/utils.h>
#include <torch/csrc/inductor/cpp_wrapper/device_internal/cpu.h>

[[maybe_unused]] inline int64_t align(int64_t nbytes) { return (nbytes + 63) & -64; }

namespace torch::aot_inductor {

struct AOTInductorModel {
    const std::vector<ConstantHandle> *constants_;
    const int32_t device_idx_ = -1; /* of the CPU */

    void run_impl(AtenTensorHandle *inputs, AtenTensorHandle *outputs, DeviceStreamType, AOTIProxyExecutorHandle);
    void _const_run_impl(std::vector<AtenTensorHandle> &, DeviceStreamType, AOTIProxyExecutorHandle);
};

/* `call.c` has looked at the operands. */
inline void __check_inputs_outputs(AtenTensorHandle *, AtenTensorHandle *) {}

/* Kernels write into what they are given, which autograd refuses for a tensor that requires a gradient. */
struct NoGradient {
    const bool before = aoti_torch_grad_mode_is_enabled();
    NoGradient() { aoti_torch_grad_mode_set_enabled(false); }
    ~NoGradient() { aoti_torch_grad_mode_set_enabled(before); }
};

} // namespace torch::aot_inductor
