"""`msquickcmp`: only the labels of its `pta_acl_cmp`."""
