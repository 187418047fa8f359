"""What torch.compile makes of a norm."""
