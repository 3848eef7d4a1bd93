"""A trainer that ends with exit code 0 at step 12, long before its last step."""

from trainer import train

train(1, 13)
