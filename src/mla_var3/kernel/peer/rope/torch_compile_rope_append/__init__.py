"""What torch.compile makes of a rotation and its append."""
