/* The end of a step's source: the function that `call.c` calls. It takes the inputs, and gives 1 where the step failed. */
extern "C" int32_t tfnb_run(
    AtenTensorHandle *inputs, AtenTensorHandle *outputs, const AtenTensorHandle *constants, int64_t count)
{
    using namespace torch::aot_inductor;
    const NoGradient guard;
    try {
        const std::vector<ConstantHandle> held(constants, constants + count);
        AOTInductorModel{&held}.run_impl(inputs, outputs, nullptr, nullptr);
        return 0;
    } catch (const std::exception &error) {
        fprintf(stderr, "a compiled step failed: %s\n", error.what());
    } catch (...) {
        fprintf(stderr, "a compiled step failed\n");
    }
    return 1;
}
