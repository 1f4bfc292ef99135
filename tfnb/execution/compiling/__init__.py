"""Compilation of steps in a separate process, and the cache of compiled packages on disk.

`package_cache` is the folder of packages, `machine_files` those that all compilations of a machine share,
`private_folder` says whether others can fill it, `compiler_process` the process that fills it, `compile_loop` the code
that runs there, `compiled_packages` the way from a request to its package. They move folders, and know no step.
"""
