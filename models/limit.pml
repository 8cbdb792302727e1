/*
 * A concurrency limit and the tokens of locks (docs/adr/0012-distant-limits-are-not-counted.md): claims count locks only near the limit.
 *
 * The model follows lane_headroom, the insert of lock records and charge_lanes. Every lock takes the next token of one sequence.
 * A claim shares the advisory lock of the limit until it has committed, and is undone if it drew a token beyond uncounted_to; one
 * that has to count takes the advisory lock exclusively. Advisory locks are taken with try, so that no claim waits for another.
 *
 * Claim that is checked:
 *   no committed state is beyond the limit: locks <= MAX
 *
 * Variants, each of which has to violate it:
 *   UNSHARED       a claim that does not count takes no advisory lock
 *   EARLY_COUNT    locks are counted before the advisory lock is exclusive, as by a snapshot that is older than the lock
 *   UNCHECKED      a claim is not undone where it drew a token beyond uncounted_to
 *   LEAVE_BOUND    an operator lowers the limit and leaves uncounted_to
 */

#ifndef CLAIMERS
#define CLAIMERS 3
#endif
#ifndef CLAIMS
#define CLAIMS 2
#endif
#define WANTED 1         /* locks of a claim */

byte max_units = 4;
byte locks = 0;          /* committed lock records, each of one unit */
byte drawn = 0;          /* the last token of the sequence; a draw is not undone by a rollback */
byte uncounted_to = 0;

byte shared = 0;         /* holders of the advisory lock of the limit in shared mode */
bool exclusive = 0;      /* one transaction has it exclusively, and may have it shared as well */

proctype claimer() {
	byte claims, headroom, bound, new_bound, used, my_token;
	bool sharing, counting;

	do
	:: claims == CLAIMS -> break
	:: claims < CLAIMS ->
		d_step { claims++; sharing = 0; counting = 0; headroom = 0; bound = 0; new_bound = 0; used = 0; my_token = 0 };
#ifdef EARLY_COUNT
		used = locks;
#endif
		/* The advisory lock, shared. */
		d_step {
			if
			:: !exclusive -> shared++; sharing = 1
			:: else
			fi
		};
#ifdef UNSHARED
		d_step { if :: sharing -> shared--; sharing = 0 :: else fi; sharing = 1 };
#endif
		if
		:: !sharing -> goto next                           /* busy: nothing was claimed */
		:: else
		fi;
		/* The limit is far: uncounted_to is beyond every token that this claim expects to draw. */
		d_step { bound = uncounted_to; headroom = WANTED };
		if
		:: bound >= drawn + WANTED -> goto draw
		:: else
		fi;
		/* Else count, alone. */
		d_step {
			if
#ifdef UNSHARED
			:: !exclusive && shared == 0 -> exclusive = 1; counting = 1
#else
			:: !exclusive && shared == 1 -> exclusive = 1; counting = 1
#endif
			:: else
			fi
		};
		if
		:: !counting -> goto undo
		:: else
		fi;
#ifndef EARLY_COUNT
		used = locks;
#endif
		d_step {
			bound = 255;                                   /* what was counted is not checked again */
			if
			:: max_units > used -> headroom = max_units - used
			:: else -> headroom = 0
			fi;
			if                                             /* a new bound, where enough is left for two claims */
			:: headroom >= 2 * WANTED -> new_bound = drawn + headroom
			:: else
			fi
		};
		if
		:: headroom == 0 -> goto undo
		:: else
		fi;
draw:
		atomic { drawn++; my_token = drawn };
		if
#ifndef UNCHECKED
		:: my_token > bound -> goto undo                   /* charge_lanes raises 40001 */
#endif
		:: else -> skip
		fi;
		if
		:: d_step {                                        /* commit, and with it the row of the limit */
			locks++;
			if :: new_bound != 0 -> uncounted_to = new_bound :: else fi;
			assert(locks <= max_units)
		   }
		:: skip                                            /* rollback */
		fi;
undo:
		skip;
		d_step {
#ifndef UNSHARED
			if :: sharing -> shared-- :: else fi;
#endif
			if :: counting -> exclusive = 0 :: else fi
		};
next:
		skip
	od
}

/* A lock ends: finished, or recovered from a node that died. */
proctype ender() {
	byte ends;
	do
	:: ends < 2 && locks > 0 -> d_step { locks--; ends++ }
	:: break
	od
}

/* An operator lowers the limit behind the exclusive advisory lock. Locks that run by then may be more than it permits. */
proctype operator() {
	d_step { !exclusive && shared == 0; exclusive = 1 };
	d_step {
		if
		:: locks <= 2 -> max_units = 2
		:: else
		fi;
#ifndef LEAVE_BOUND
		uncounted_to = 0;
#endif
		exclusive = 0
	}
}

init {
	byte i;
	atomic {
		for (i : 1 .. CLAIMERS) { run claimer() };
		run ender();
		run operator()
	};
	_nr_pr == 1;
	assert(shared == 0 && !exclusive)
}
