"""Version 20: flash_mla_v16 whose tiles come in boxes of whole tokens, from the first one on."""
