"""Plug-ins of serving engines: vLLM and SGLang call the functions of `mla_var3.ops` through them.

An engine finds its plug-in by an entry point of the installed package. docs/engines.md says what is supported.
"""
