"""`python -m mla_var3.cli`: the same as `mla-var3`."""

from mla_var3.cli import main

raise SystemExit(main())
