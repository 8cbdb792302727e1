// Package server speaks the dispatcher protocol in front of a few models.
//
// A call names a model and brings a payload. It starts a run, or attaches to the run that its
// entry already has. A run waits in the direct queue (direct callers only), holds a slot while the
// model computes, and ends completed or failed:
//
//	call -> admit -> [direct queue] -> slot -> completed | failed
//	                        \____________\__-> failed: cancelled, deadline exceeded, caller gone
//
// Two kinds of callers share the slots. The dispatcher (header X-Source: dispatcher) gets a slot at
// once or a 503, and also a 503 while direct callers wait, so that it goes elsewhere. Direct callers
// wait in a short queue and go first.
//
// Calls that name an entry are fenced: once a higher token was seen for the entry, lower ones are
// refused with 409. A synchronous run lives as long as somebody waits for it; an asynchronous one
// until it ends, and its result is kept for a while.
package server
