// Package backend has the backends that start and stop instances for the autoscaler: processes on this machine
// (Local), a cluster (Kubernetes), and whatever follows an HTTP request (Webhook).
//
// Each gives the same order again without a second effect, so that a leader that died between an order and its
// record does no harm. None stops an instance that an order does not name.
//
// Local:
//
//	local.go         starts and ends processes, and says which instances they are
//	local_unix.go    sessions, signals, and the lock that excludes other leaders of the machine
//	local_other.go   the same where the system is another
//	process.go       which processes are those of an instance
//	process_linux.go how processes are looked up: in /proc
//	process_other.go the same where there is none
//	record.go        the files by which the next leader finds the processes
//
// Kubernetes:
//
//	kubernetes.go    the scale subresource of a target, and the calls of the API server
//	pods.go          pods as instances
//	remove.go        which pods go, and how
//	watch.go         lists that are answered from a watch
//
// Webhook:
//
//	webhook.go       orders as HTTP requests
package backend
