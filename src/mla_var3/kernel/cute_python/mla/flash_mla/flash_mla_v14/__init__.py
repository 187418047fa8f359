"""Version 14: flash_mla_v13 whose blocks stand ready while the call before ends."""
