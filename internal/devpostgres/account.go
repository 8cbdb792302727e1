package devpostgres

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account is the system user a server runs as. The zero value is the user of this process.
// Postgres refuses to run as root, so root hands over to another user.
type account struct {
	name     string
	uid, gid uint32
	drop     bool
}

// serverAccount is this process's own user or, for root, postgres or else nobody.
func serverAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
		if uidErr == nil && gidErr == nil && uid != 0 {
			return account{name: name, uid: uint32(uid), gid: uint32(gid), drop: true}, nil
		}
	}
	return account{}, errors.New("run Postgres as root: it refuses, and there is neither a user postgres nor nobody " +
		"to run it as")
}

// attributes are those of a process in the account's name and in a session of its own,
// so that the terminal's Ctrl-C does not reach it.
func (a account) attributes() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true}
	if a.drop {
		attr.Credential = &syscall.Credential{Uid: a.uid, Gid: a.gid}
	}
	return attr
}

// own gives a file or directory to the account.
func (a account) own(path string) error {
	if !a.drop {
		return nil
	}
	return os.Lchown(path, int(a.uid), int(a.gid))
}

// reach returns an error if the account may not enter directory dir, which must exist.
func (a account) reach(dir string) error {
	if !a.drop {
		return nil
	}
	for d := dir; ; d = filepath.Dir(d) {
		info, err := os.Stat(d)
		if err != nil {
			return err
		}
		if !a.enters(info) {
			return fmt.Errorf("user %s, as whom root runs Postgres, may not enter %s: choose a directory elsewhere, "+
				"or run as another user", a.name, d)
		}
		if d == filepath.Dir(d) {
			return nil
		}
	}
}

func (a account) enters(info os.FileInfo) bool {
	mode := info.Mode().Perm()
	owner, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case ok && owner.Uid == a.uid:
		return mode&0o100 != 0
	case ok && owner.Gid == a.gid:
		return mode&0o010 != 0
	}
	return mode&0o001 != 0
}
