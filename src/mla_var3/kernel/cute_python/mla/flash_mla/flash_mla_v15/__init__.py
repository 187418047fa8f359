"""Version 15: flash_mla_v10 whose blocks stand ready while the call before ends."""
