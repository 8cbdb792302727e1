package tasknode

import "github.com/penstock/penstock/pkg/invalidation"

// suspect says that one more crash makes the entry poison. When several suspects run on a node that dies, its
// death says nothing about any of them, so a node runs one suspect at a time: those that are innocent end,
// and the one that kills its node is alone in counting the crash.
func suspect(q *invalidation.Queue, e *invalidation.Entry) bool {
	return e.Crashes > 0 && e.Crashes+1 >= q.Config.CrashLimit
}

// admitSuspect returns a function that ends the turn of a suspect, or nil while another suspect runs on this node.
func (n *Node) admitSuspect() (done func()) {
	if !n.suspectRuns.CompareAndSwap(false, true) {
		return nil
	}
	return func() { n.suspectRuns.Store(false) }
}
