"""Images, with what is to be learnt of them."""
