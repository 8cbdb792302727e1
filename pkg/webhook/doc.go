// Package webhook signs and delivers callbacks to addresses that clients chose.
//
// The addresses are hostile until proven otherwise: each is checked when it is
// registered (Policy.CheckURL), and the address that its name resolves to is
// checked again at the moment of connecting (Policy.Dialer), so that a name
// which changes its mind in between reaches nothing. No redirect is followed.
//
// A Handler makes one attempt a run. When to make the next is arithmetic
// (Schedule): the keeper of the deliveries, one entry each in a webhook queue,
// stores the outcome and asks again later. A receiver that is down or slow costs the
// others nothing: its breaker opens, its share of calls in flight is bounded,
// and both are answered deferred, which is not an attempt.
package webhook
