package testkit

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority issues certificates.
type Authority struct {
	// File has the authority's own certificate.
	File        string
	directory   string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// Pair has the files of a certificate and its key.
type Pair struct{ Cert, Key string }

// NewAuthority makes an authority.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{directory: t.TempDir()}
	a.certificate = template("a test's own")
	a.certificate.IsCA, a.certificate.BasicConstraintsValid = true, true
	a.certificate.KeyUsage = x509.KeyUsageCertSign
	a.key = newKey(t)
	a.File = a.sign(t, "ca", a.certificate, a.key).Cert
	return a
}

// Server issues a certificate for 127.0.0.1.
func (a *Authority) Server(t testing.TB, name string) Pair {
	t.Helper()
	certificate := template(name)
	certificate.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	return a.sign(t, name, certificate, newKey(t))
}

// Client issues a certificate whose common name is the name.
func (a *Authority) Client(t testing.TB, name string) Pair {
	t.Helper()
	return a.sign(t, name, template(name), newKey(t))
}

func template(name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(48 * time.Hour),
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (a *Authority) sign(t testing.TB, name string, certificate *x509.Certificate, key *ecdsa.PrivateKey) Pair {
	t.Helper()
	signed, err := x509.CreateCertificate(rand.Reader, certificate, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	pair := Pair{filepath.Join(a.directory, name+".crt"), filepath.Join(a.directory, name+".key")}
	write(t, pair.Cert, "CERTIFICATE", signed)
	write(t, pair.Key, "PRIVATE KEY", secret)
	return pair
}

func write(t testing.TB, path, kind string, bytes []byte) {
	t.Helper()
	text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: bytes})
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}
