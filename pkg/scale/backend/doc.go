// Package backend has the backends that start and stop instances for the autoscaler: processes on this machine
// (Local), a cluster (Kubernetes), and whatever follows an HTTP request (Webhook).
//
// Each gives the same order again without a second effect, so that a leader that died between an order and its
// record does no harm. None stops an instance that an order does not name.
package backend
