"""The native tier: a whole step, with its updates, as one call of code that inductor generates and g++ compiles.

`request` says what is to be compiled, in a form that another process reads; `exportable` makes a module of plain torch
of it, and `scans` a scan of each loop; `package` compiles that into a folder, where `unrolling` puts several iterations
of a loop into its body, `product_kernels` lets the quicker library multiply, and `manifest` tells what is in it.
`step_source` is the C++ that inductor generates of the module, and `machine_code` compiles that, with a header that is
precompiled once for each machine. `call` looks at what calls are given and makes it without Python's lock, `direct`
makes a whole step of it, from feeds to fetched values; `tier` is what the chooser asks. `segments` is a step of several
packages. `trial` tries a package with `step_arguments`, in the process that built it.
"""
