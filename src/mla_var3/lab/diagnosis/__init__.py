"""Why is a kernel as fast as it is, what changed between two versions, and what is wrong with it?

`evidence` collects what is known of a kernel, `verdict` judges it, and `mla-var3 diagnose` prints it; `versions` and
`compare` are `mla-var3 diff`; `sanitizer` runs a version under compute-sanitizer, and `reports` tells what that reports
and is known to be no fault from the rest.
"""
