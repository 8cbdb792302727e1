/*
 * The outbox of callbacks: an ending and the entry of its callback in one transaction, deliveries that can be repeated.
 *
 * The model follows settleHeld with queueCallbacks, and the delivery of an entry of the queue webhook by a node. Settling is repeated
 * where the answer to the commit was lost. A delivery is one HTTP request with the id of its entry; its answer can be lost, and the
 * node can die before it has recorded the end of the delivery, so that another node delivers again.
 *
 * Claims are checked:
 *   one delivery id per ending   an ended entry has one entry of a callback; one that has not ended has none
 *   delivered                    when all has ended, the receiver has seen the id of each ending at least once
 *   no delivery before the end   the receiver sees no id of an ending that was not committed
 *
 * Variants, each of which has to violate one of the claims:
 *   AFTER      the callback is pushed in a transaction of its own, after that of the ending
 *   BEFORE     the callback is pushed in a transaction of its own, before that of the ending
 *   NO_FENCE   settling again pushes the callback without finding the lock
 */

bool ended = 0;
byte token = 1;          /* of the lock under which the entry runs; 0 when the lock has gone */
byte callbacks = 0;      /* committed entries of the queue webhook for this ending */
byte waiting = 0;        /* of these, not yet delivered and not claimed */
byte received = 0;
byte lost = 0;           /* answers to commits that were lost */

/* The node settles until it has an answer, or dies. */
proctype settler() {
	bool done = 0;
	do
	:: done -> break
	:: !done ->
#ifdef BEFORE
		d_step { callbacks++; waiting++ };
#endif
		if
		:: atomic {
#ifdef NO_FENCE
			callbacks++; waiting++;
			if :: token == 1 -> ended = 1; token = 0 :: else fi;
#else
			if
			:: token == 1 ->
				ended = 1; token = 0;
#if !defined(AFTER) && !defined(BEFORE)
				callbacks++; waiting++;
#endif
			:: else
			fi;
#endif
			done = 1
		   };
		   if
		   :: lost < 2 -> lost++; done = 0                  /* the answer to the commit was lost: settle again */
		   :: skip
		   fi
		:: lost < 2 -> lost++                              /* the transaction was lost */
		:: break                                           /* the node dies; recovery runs the entry elsewhere */
		fi;
#ifdef AFTER
		if
		:: done -> d_step { callbacks++; waiting++ }
		:: else
		fi
#endif
	od
}

/* Two nodes claim and deliver callbacks. */
proctype deliverer() {
	byte failures;
	do
	:: atomic { waiting > 0 -> waiting-- };
		if
		:: atomic { assert(ended); received++ }            /* the request arrives */
		:: failures < 1 -> failures++; waiting++; goto next    /* it does not: the entry is retried */
		fi;
		if
		:: skip                                            /* the delivery is settled */
		:: failures < 1 -> failures++; waiting++           /* it is not: the node died, or the answer was lost */
		fi;
next:	skip
	:: timeout -> break
	od
}

init {
	atomic {
		run settler();
		run deliverer();
		run deliverer()
	};
	_nr_pr == 1;
	assert(callbacks == ended);                            /* one delivery id per ending */
	assert(!ended || received >= 1)
}
