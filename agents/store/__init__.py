"""The store of the cluster's records: one interface, in etcd or embedded in sailord."""
