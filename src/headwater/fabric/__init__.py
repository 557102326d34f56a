"""How several compute ranks share weights and sum gradients."""
