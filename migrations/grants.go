package migrations

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Duties are the programs and uses for which a database role can have rights. The table of rights
// is functions/rights.sql.
var Duties = []string{"leader", "node", "gateway", "operator", "push", "read"}

// Role is a database role and its duty.
type Role struct {
	Name string
	Duty string // one of Duties
	// Password lets the role log in. Without one it keeps what it has: a new role cannot log in, and gives
	// its rights to roles that are members of it.
	Password string
	// ReplacePassword is for a role that can log in and has no duty in this database: roles belong to the server, and
	// another installation may use the password that it has.
	ReplacePassword bool
}

// Roles returns a role for each duty, named prefix_duty.
func Roles(prefix string) []Role {
	roles := make([]Role, len(Duties))
	for i, duty := range Duties {
		roles[i] = Role{Name: prefix + "_" + duty, Duty: duty}
	}
	return roles
}

// DutiesThatDiagnose need the membership in pg_read_all_stats: a role without it sees of the sessions of others neither
// what they run nor since when.
var DutiesThatDiagnose = []string{"leader", "operator", "read"}

const dutyGrantsSQL = `SELECT penstock.duty_grants($1, $2)`

// GrantSQL returns a script that makes the roles, gives each the rights of its duty on the objects
// of this database and revokes those it has beyond them. It can be run any number of times, by the
// owner of the schema with the right to make roles. Passwords are in it as SCRAM verifiers only.
func GrantSQL(ctx context.Context, db Queryer, roles []Role) (string, error) {
	var script strings.Builder
	fmt.Fprintln(&script, "BEGIN;")
	for _, role := range roles {
		if err := role.checkTaken(ctx, db); err != nil {
			return "", err
		}
		preparation, err := role.prepareSQL()
		if err != nil {
			return "", err
		}
		rows, _ := db.Query(ctx, dutyGrantsSQL, role.Duty, role.Name)
		grants, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return "", fmt.Errorf("read the rights of %s: %w", role.Duty, err)
		}
		fmt.Fprintf(&script, "\n-- %s\n%s", role.Name, preparation)
		for _, grant := range grants {
			fmt.Fprintln(&script, grant+";")
		}
		fmt.Fprintf(&script, "SELECT penstock.grant_duty(%s, %s);\n", literal(role.Duty), literal(role.Name))
	}
	fmt.Fprintln(&script, "\nCOMMIT;")
	return script.String(), nil
}

const grantDutySQL = `SELECT penstock.grant_duty($1, $2)`

// Granted is what a call of Grant did.
type Granted struct {
	Changed int      `json:"changed"`         // rights that it gave or took
	Notes   []string `json:"notes,omitempty"` // notices of the server: rights that the owner may not give
}

// Grant carries out the script of GrantSQL. The connection must be that of the owner of the schema. It waits for a
// migration that runs, at most a minute, and two minutes for transactions that hold a role or the rights of an object.
func Grant(ctx context.Context, cfg *pgx.ConnConfig, roles []Role) (done Granted, err error) {
	cfg = cfg.Copy()
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if !slices.Contains(done.Notes, n.Message) {
			done.Notes = append(done.Notes, n.Message)
		}
	}
	m, err := open(cfg, setUp)
	if err != nil {
		return Granted{}, err
	}
	defer m.db.Close()
	err = m.untilFree(ctx, rightsHeld, func() error {
		return m.locked(ctx, func(conn *sql.Conn) error {
			return m.with(conn, func(c *pgx.Conn) error {
				done.Changed, err = grantAll(ctx, c, cfg.User, roles)
				return err
			})
		})
	})
	return done, err
}

// rightsHeld is the text for another transaction that changes rights. It names no session: that may belong to another
// database of the server, and the view of locks shows it no more after the wait has ended.
func rightsHeld(_ context.Context, waited time.Duration) (text string, found bool) {
	return fmt.Sprintf("a transaction that changes roles or rights was open for %v; wait for it, or end it, and start "+
		"again", waited), false
}

// grantAll gives all roles their rights, or none.
func grantAll(ctx context.Context, c *pgx.Conn, user string, roles []Role) (changed int, err error) {
	owns, err := Owns(ctx, c)
	if err != nil {
		return 0, err
	}
	if !owns {
		return 0, &OwnerError{User: user}
	}
	err = pgx.BeginFunc(ctx, c, func(tx pgx.Tx) error {
		for _, role := range roles {
			n, err := role.grant(ctx, tx)
			if err != nil {
				return err
			}
			changed += n
		}
		return nil
	})
	return changed, err
}

func (r Role) grant(ctx context.Context, tx pgx.Tx) (changed int, err error) {
	if err := r.checkTaken(ctx, tx); err != nil {
		return 0, err
	}
	preparation, err := r.prepareSQL()
	if err != nil {
		return 0, err
	}
	if _, err := tx.Exec(ctx, preparation); err != nil {
		err = fmt.Errorf("make role %q: %w", r.Name, err)
		var refused *pgconn.PgError
		if errors.As(err, &refused) && refused.Code == "42501" {
			return 0, &AdminError{err}
		}
		return 0, err
	}
	if err := tx.QueryRow(ctx, grantDutySQL, r.Duty, r.Name).Scan(&changed); err != nil {
		return 0, fmt.Errorf("grant to role %q: %w", r.Name, err)
	}
	return changed, nil
}

// AdminError says that the owner of the schema may not make a role, or not give it a password. The first needs
// CREATEROLE. From Postgres 16 on the second needs ADMIN on the role, which the role that made it has, and no other:
// roles of a dump of Postgres 15 were made by the superuser who restored them.
type AdminError struct{ error }

func (e *AdminError) Unwrap() error { return e.error }

// TakenError says that a role that was to get a password may be that of another installation on the server.
type TakenError struct{ Role string }

func (e *TakenError) Error() string {
	return fmt.Sprintf("role %q can log in already and has no duty in this database: a new password would lock out "+
		"another installation on the server that uses it", e.Role)
}

const takenSQL = `
SELECT EXISTS (SELECT FROM pg_roles p
                WHERE p.rolname = $1 AND p.rolcanlogin
                  AND NOT EXISTS (SELECT FROM penstock.database_role r WHERE r.role = p.rolname))`

// checkTaken returns a *TakenError unless the role may have its password.
func (r Role) checkTaken(ctx context.Context, db Queryer) error {
	if r.Password == "" || r.ReplacePassword {
		return nil
	}
	var taken bool
	if err := db.QueryRow(ctx, takenSQL, r.Name).Scan(&taken); err != nil {
		return fmt.Errorf("look for role %q: %w", r.Name, err)
	}
	if taken {
		return &TakenError{r.Name}
	}
	return nil
}

const ownsSQL = `
SELECT coalesce((SELECT pg_has_role(nspowner, 'USAGE') FROM pg_namespace WHERE nspname = 'penstock'), true)`

// Owns says whether the role of the session owns the schema, or may make it: only such a role can migrate.
func Owns(ctx context.Context, db Queryer) (bool, error) {
	var owns bool
	if err := db.QueryRow(ctx, ownsSQL).Scan(&owns); err != nil {
		return false, fmt.Errorf("read the owner of the schema: %w", err)
	}
	return owns, nil
}

// prepareSQL makes the role and lets it log in, connect, and, where its duty diagnoses, see statistics of other
// sessions. Roles are shared by all databases of the cluster: another session may make the same one at the same time.
func (r Role) prepareSQL() (string, error) {
	if !slices.Contains(Duties, r.Duty) {
		return "", fmt.Errorf("there is no duty %q; there are %s", r.Duty, strings.Join(Duties, ", "))
	}
	name := pgx.Identifier{r.Name}.Sanitize()
	var script strings.Builder
	fmt.Fprintf(&script, `DO $$ BEGIN
    IF to_regrole(%s) IS NULL THEN CREATE ROLE %s NOLOGIN; END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; -- made by another session just now
END $$;
`, literal(name), name)
	if r.Password != "" {
		verifier, err := scramVerifier(r.Password)
		if err != nil {
			return "", fmt.Errorf("password of role %q: %w", r.Name, err)
		}
		fmt.Fprintf(&script, "ALTER ROLE %s LOGIN PASSWORD %s;\n", name, literal(verifier))
	}
	rights := "CONNECT"
	if r.Duty == "leader" || r.Duty == "operator" {
		rights += ", TEMPORARY" // declared statements are parsed as the body of a temporary function
	}
	fmt.Fprintf(&script, `DO $$ BEGIN
    EXECUTE format('GRANT %s ON DATABASE %%I TO %%I', current_database(), %s);
END $$;
`, rights, literal(r.Name))
	if slices.Contains(DutiesThatDiagnose, r.Duty) {
		fmt.Fprintf(&script, `DO $$ BEGIN
    IF NOT pg_has_role(%s, 'pg_read_all_stats', 'MEMBER') THEN GRANT pg_read_all_stats TO %s; END IF;
EXCEPTION WHEN insufficient_privilege THEN RAISE NOTICE 'a superuser should run: GRANT pg_read_all_stats TO %s';
    WHEN unique_violation THEN NULL; -- granted by another session just now
END $$;
`, literal(r.Name), name, strings.ReplaceAll(name, "'", "''"))
	}
	return script.String(), nil
}

// literal quotes a text for SQL.
func literal(text string) string {
	quoted := "'" + strings.ReplaceAll(text, "'", "''") + "'"
	if strings.Contains(text, `\`) {
		quoted = " E" + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}

// scramIterations is Postgres' default.
const scramIterations = 4096

// scramVerifier returns what Postgres stores of a password (RFC 5803, SCRAM-SHA-256), so that no password reaches the
// server's log. SASLprep leaves printable ASCII as it is; other passwords are refused.
func scramVerifier(password string) (string, error) {
	if strings.ContainsFunc(password, func(r rune) bool { return r < ' ' || r > '~' }) {
		return "", errors.New("has characters beyond printable ASCII, or a line break")
	}
	salt := make([]byte, 16)
	_, _ = rand.Read(salt) // it never fails
	salted, err := pbkdf2.Key(sha256.New, password, salt, scramIterations, sha256.Size)
	if err != nil {
		return "", err
	}
	mac := func(text string) []byte {
		h := hmac.New(sha256.New, salted)
		h.Write([]byte(text))
		return h.Sum(nil)
	}
	stored := sha256.Sum256(mac("Client Key"))
	text := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s",
		scramIterations, text(salt), text(stored[:]), text(mac("Server Key"))), nil
}
