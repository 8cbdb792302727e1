// Package webhook signs and delivers callbacks to addresses that clients chose.
//
// The addresses are taken for hostile: each is checked when it is registered (AddressPolicy.CheckURL), and the address
// that its name resolves to is checked again at the moment of connecting (AddressPolicy.Dialer), so that a name which
// resolves to something else by then reaches nothing. No redirect is followed.
//
// A Handler makes one attempt a run. When to make the next is arithmetic (Schedule): the entry of the webhook queue is
// handed back until then. A receiver that is down or slow costs the others nothing: its breaker opens, and its share of
// the attempts in flight is bounded. Messages that wait for either are deferred, which is no attempt, unless a breaker
// is open beyond the time of the next one.
//
//	handler.go                 a run: find the receiver, make an attempt, turn its outcome into an ending
//	deliver.go                 one attempt by HTTP, and what its answer means
//	endpoint.go                breakers, and bounds on attempts in flight
//	schedule.go                the times of attempts
//	address.go, dial.go        which addresses are allowed: as written, and as resolved
//	envelope.go, sign.go       the body, its headers and signatures
//	registry.go                receivers and their secrets in the database
//	keeper.go                  the verbs of operators on them
//	derive.go, vault.go        the secrets of receivers without one of their own, and how secrets are sealed
package webhook
