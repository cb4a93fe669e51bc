"""Valkey over RDMA."""
