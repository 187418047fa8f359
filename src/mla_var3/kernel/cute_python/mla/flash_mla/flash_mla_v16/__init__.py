"""Version 16: flash_mla_v8 that asks for the odd tile of a first pair behind the even one."""
