"""Tables for people. Records are for programs; see `mla_var3.record`."""
