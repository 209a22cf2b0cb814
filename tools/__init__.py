"""Programs that make and check what people read: pages and pictures of the documentation. worqr itself needs none of them."""
