/*
 * The lease of the elected leader, under pauses of processes and jumps of the database's clock.
 *
 * The model follows takeSQL, renewSQL, resignSQL and holds_term. The lease is a row with a growing term. Every write of an elected
 * duty is a transaction that locks the row of its term FOR KEY SHARE; a take-over locks it FOR UPDATE SKIP LOCKED. A process may be
 * stopped between any two of its steps for any time, which interleaving covers. The clock moves forwards by itself, and jumps.
 *
 * Claims are checked:
 *   terms are in order   no write of a term is committed after the take-over of a later term was
 *   progress             a row whose holder is gone is taken, whatever the clock did
 *
 * Variants, each of which has to violate one of the claims:
 *   UNHELD         a write reads the row of its term without a lock
 *   OWN_CLOCK      a write relies on the time of its last renewal, and reads no row
 *   SAME_TERM      a take-over does not draw a new term
 *   NO_FUTURE      a row that was renewed in the future is not free (the clock was set back)
 */

#ifndef LEADERS
#define LEADERS 2
#endif
#define LEASE 1
#define NOON  3          /* the clock begins here, so that it can be set back */
#define LAST  6

byte clock = NOON;
byte jumps = 0;

byte term = 1;           /* the committed row; process 1 was elected before */
byte renewed = NOON;
bool row_updated = 0;    /* FOR UPDATE */
byte row_shared  = 0;    /* holders of FOR KEY SHARE */
byte takeovers = 0;       /* committed; the model's own count, which no process reads */

#ifdef NO_FUTURE
#define FREE (renewed + LEASE <= clock)
#else
#define FREE (renewed + LEASE <= clock || renewed > clock + LEASE)
#endif

#ifdef OWN_CLOCK
#define REMEMBER until = clock + LEASE
#else
#define REMEMBER skip
#endif

proctype leader(byte my_term) {
	byte polls, writes, until, mine;
	bool holds;

	until = NOON + LEASE;
	do
	/* A follower polls. */
	:: my_term == 0 && polls < 2 ->
		atomic {
			polls++;
			if
			:: FREE && !row_updated && row_shared == 0 -> row_updated = 1; holds = 1
			:: else -> holds = 0
			fi
		};
		if
		:: holds ->
			d_step {
#ifdef SAME_TERM
				my_term = term;
#else
				my_term = term + 1;
#endif
				takeovers++;
				mine = takeovers;
				term = my_term;
				renewed = clock;
				REMEMBER;
				row_updated = 0;
				holds = 0
			}
		:: else
		fi
	/* The leader renews; an update waits for nothing here, for a KEY SHARE lock does not exclude it. */
	:: my_term != 0 && polls < 2 ->
		d_step {
			polls++;
			if
			:: term == my_term && !row_updated && renewed + LEASE > clock -> renewed = clock; REMEMBER
			:: else -> my_term = 0
			fi
		}
	/* It writes within its term. */
	:: my_term != 0 && writes < 2 ->
#if defined(OWN_CLOCK)
		d_step { writes++; holds = (clock < until) };
#elif defined(UNHELD)
		d_step { writes++; holds = (term == my_term && renewed + LEASE > clock) };
#else
		atomic {
			!row_updated;                                  /* FOR KEY SHARE waits for a take-over, and reads the row again */
			writes++;
			holds = (term == my_term && renewed + LEASE > clock);
			if :: holds -> row_shared++ :: else fi
		};
#endif
		if
		:: holds ->
			d_step {                                       /* commit */
				assert(mine == takeovers);                 /* terms are in order */
#if !defined(OWN_CLOCK) && !defined(UNHELD)
				row_shared--;
#endif
				holds = 0
			}
		:: else -> my_term = 0
		fi
	/* It resigns, or dies and leaves the row. */
	:: my_term != 0 ->
		if
		:: d_step { if :: term == my_term && !row_updated && row_shared == 0 -> renewed = 0 :: else fi; my_term = 0 }
		:: break
		fi
	:: my_term == 0 && polls == 2 -> break
	:: my_term == 0 -> break
	od
}

proctype database_clock() {
	do
	:: clock < LAST -> clock++
	:: jumps < 1 -> d_step { jumps++; clock = LAST }
	:: jumps < 1 -> d_step { jumps++; clock = 0 }
	:: break
	od
}

init {
	byte i;
	atomic {
		run leader(1);
		for (i : 2 .. LEADERS) { run leader(0) };
		run database_clock()
	};
	_nr_pr == 1;
	assert(row_shared == 0 && !row_updated);
	/* Progress: no holder is left, so that the row is free, or will be after the time of one lease by this clock. */
	do
	:: FREE -> break
	:: else -> d_step { i++; clock++ }; assert(i <= 2 * LEASE + LEADERS + 1)
	od
}
