"""Half the multiplications by 2:4 sparsity: two of every four weights are zero."""
