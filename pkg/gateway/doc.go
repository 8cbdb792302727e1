// Package gateway is the second way in to the workers: it admits, orders and forwards requests whose
// clients wait on their connections, and counts every call in the slots that durable entries use too.
//
// # Words
//
//	online      a client waits on its connection
//	durable     an entry of a queue
//	pool        all usable instances of a model, with the requests that wait for them
//	flow        the unit of fairness: the tenant of the token, or a name that the tenant gives below itself
//	criticality of a request: critical, default or sheddable. Under load the lower ones wait longer and are refused
//	            first (Beyer et al., Site Reliability Engineering, chapter 21; Gateway API Inference Extension).
//	            The priority of an entry is a number, and the class of a failure another thing
//	in flight   of a call: it has a slot of one of the pool's instances, and has not ended
//	ceiling     calls that may be in flight: slots held here, no more than the adaptive limit of each instance
//	cost        slot-milliseconds: how long a call keeps a slot. Flows are charged it times the GPUs of the instance
//	            and the sequences that a generation asks for
//	holdback    the part of the ceiling up to which a criticality passes the queue by
//	floor       the share of the service of the last 10 s, or of the last 20 calls where these take longer to begin,
//	            below which a criticality goes first
//	hand over   a holder of an idle slot moves its row to a node that waits for one
//	preempt     end the run of a durable entry, which goes back to its position without an attempt spent
//
// # The way of a request
//
//	gateway.go      what a gateway is made of, and what is set from outside: models, tokens, flows
//	arrive.go       how long the body of a request may take, and the rest of one that was not read
//	operation.go    the paths of the OpenAI API, and what is known of each
//	server.go       routes, and a request from its head to its end
//	access.go       who sends it, by its token; requests of mounted routes are admitted here too
//	mount.go        the tools of routes that other packages mount: bodies, errors, texts
//	token.go        tokens and their limits
//	tokencounts.go  what the requests of a token do at other gateways
//	pushlimit.go    the limits of a token on the entries that its requests become
//	held.go         the body in memory, within its bounds of bytes and time
//	body.go         what a request asks for, by its body
//	choices.go      how many sequences it asks for, and the limit on them
//	models.go       the list of models that a caller may use
//	scan.go         finds model, stream and stream_options in the body without decoding the rest
//	walk.go         walks over JSON, for scan.go
//	async.go        the choice between an answer on the connection and an entry of the queue
//	cogcall.go      the members of a call in Cog's protocol
//	durable.go      which requests can become entries, and the push of those into the queues of their models
//	sharedpool.go   waits for the pool's decision: one mutex a pool, one timer, no goroutine
//	forward.go      the exchange with the worker, byte for byte
//	judge.go        answers that are none to the client: the worker had no room, is unfit, or its run goes on
//	unfit.go        answers of instances that refuse the gateway itself, or do not have what was asked for
//	headers.go      the headers of a client that go on, and those that a worker gets in their place
//	direct.go       connections to workers, and an exchange over HTTP/1.1
//	send.go         the request on its way to the worker, and whether the worker may have got something of it
//	probe_unix.go   whether an idle connection is still open
//	probe_other.go  the same where the system cannot be asked
//	window.go       the buffer of an answer, and the token counts at its end or beginning
//	passing.go      the body of an answer on its way to the client, and the limits on silence and stalls
//	stream.go       the events of an answer: the chunk that was asked for in the client's place
//	paused.go       which requests a pause holds, those that wait too
//	retry.go        how many second attempts there may be
//	rejection.go    the reasons why a request was not served
//	refuse.go       the errors that clients read
//	ring.go         the last requests, for explain
//
// # The parts of the pool
//
//	request.go      a request, what the pool knows of it, and how its call ended
//	pool.go         the state machine: arrive, dispatch, cancel, end
//	supply.go       what changes from outside: instances, slots, settings
//	demand.go       how many slots the waiting requests could use
//	view.go         the state of a pool, for status and metrics
//	policy.go       the settings
//	criticality.go  the criticalities
//	flow.go         fair queueing of the flows of a criticality
//	cost.go         estimates of what a call costs
//	expect.go       estimates of waits, and the refusal of requests that would wait too long
//	expire.go       the ends of waits
//	evict.go        who makes room in a full pool
//	floor.go        what each criticality was served with of late, against its floor
//	mode.go         PASS, QUEUE and COLD
//	fleet.go        the instances with the slots held here
//	pick.go         the choice of an instance: affinity, adapters, least work
//	fault.go        instances whose calls fail at once
//	limit.go        the adaptive limit of an instance
//
// # The account of slots
//
// The statements are those of package slot, which task nodes send as well. The pool of pkg/inference is another thing:
// there an entry is claimed on a permit, and waits in its queue without one; here requests wait in the pool.
//
//	         lease, hand-over (compare)            take                End
//	database ───────────────────────────► idle ───────────► busy ───────────► idle
//	    ▲                                  │ Retire          │ End, while the pool owes slots
//	    │ Offer, HandOver, Doubt           ▼                 ▼
//	    └───────────────────────────── leaving ◄───────── returning
//	                                          surrender
//
// Slots that are idle or busy are counted by the slot.Ledger of their instance, and those that leave by the
// slot.Leaving of their leaser. A call whose end is not known drops its slot, which is in doubt then. Offer moves
// idle slots to the nodes that miss some, and the rest comes back into the pool; HandOver gives slots to nodes that
// miss some, and frees the rest.
//
//	registration.go the gateway's row among the nodes
//	leases.go       one leaser for each pool, and what they share
//	leaser.go       leases slots while requests wait, and asks for preemption
//	leasepacing.go  when it does either
//	giveback.go     gives slots back, and puts them in doubt
//	compare.go      compares the slots with the database
//	leave.go        gives back all slots, and removes the gateway's row
//	trust.go        which slots may be used after the process was stopped
//	usage.go        what calls used of workers, by the hour and in the account of the flows
//	catalog.go      models and routes as the registry has them
//	settings.go     policies, tokens and flows as the database has them
//
// # The pool
//
// Its parts are pure: callers serialise them and pass the time, and nothing in them blocks or does I/O. A simulator and
// a naive model run the same code in tests.
//
//	            Arrive                            dispatch: at every arrival, end, grant, change of limits
//	client ───────────────► waiting ─────────────────────────────────► in flight ──End──► ended
//	   │      │   bypass       │  TTL, deadline, eviction, cancel            ▲
//	   │      └────────────────┼─────────────────────────────────────────────┘
//	   └──► refused            └──► ended without a call
//
// Within a criticality flows are served by start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair
// Queueing", SIGCOMM 1996): the tag of a backlogged flow is S = max(V, F), the least S goes next, V
// becomes that S, and F = S + cost/weight. Cost is an estimate until the call has ended; then F is
// corrected by the difference. The service of two backlogged flows, divided by their weights, differs
// by at most the cost of one request of each and the error of the estimates in flight.
// Of such an error a flow is not charged what would put it further than a minute, for each unit of its
// weight, behind V (debtMax).
//
// A criticality with waiters that was served with less than its floor goes before the others. The cost of a
// call is counted when it begins, in one of ten buckets of time, although its slot is busy until it ends.
// So a bucket is as wide as two calls take to begin, 2 x mean cost / ceiling, and a second at least.
//
// Invariants, held by a test with a million random operations against a naive model:
//
//	0 <= in flight <= slots held     waiting <= total          first in, first out within flow and criticality
//	no request waits while an instance has an idle slot and room below its limit (strict_band apart)
//	each request ends exactly once, and none is dispatched after it has expired or was cancelled
package gateway
