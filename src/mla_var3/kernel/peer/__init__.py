"""Other people's libraries, a file a layer; attention's are a file a library. Each is optional.

A class with `peer = "NAME"` is the plan of `peer/NAME`, in the layer that its file's name begins with, so that
`mla_flashinfer.py` holds peers of layer mla. What the plans share is in `mla_var3.kernel.library`, and
`mla_var3.catalogue.libraries` finds the library behind each.
"""
