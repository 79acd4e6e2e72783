//! Both halves against each other over real sockets, and against peers that lie, stall or vanish.

#[path = "../../tests/support/pki.rs"]
pub(crate) mod pki;

use super::*;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pki::{Ca, Identity};
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time limit of every wait; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Valid keys of kinds that the crate `ring` does not support.
const RSA_1024: &str = "-----BEGIN PRIVATE KEY-----\n\
MIICeAIBADANBgkqhkiG9w0BAQEFAASCAmIwggJeAgEAAoGBAKeVDT0VmFHbRdwM\n\
AyyqhshRF9l7i0ETRYD6y3GipDX/g2sUUFu8GEPU8IO3IBRK9Z9aDBCMD1WdPn9F\n\
yVblPua8q1Gih7M7jBvi0rtPndxHL2Gb2tplIvY73cn+tFgOTiVie7z4pA/DRP1X\n\
l9xQUh6yzXPxvMeNF1uNnA6cfzJRAgMBAAECgYEAjQRT+47sehU2GBDTqwZkHLSA\n\
iTX43G3HEt33zEu8OuQkRjr10/vXv1y0d2Hl0K2zOsCfXl09miGTsa2b209VOZ9Z\n\
+fxyTS0wHlLiML0ayNs8C7qxBCDWhF+tqRZwHt35CAQzYTPt5dZ9OcEtwPJhNnJu\n\
hP3I0NR+uCbxc+CL+TECQQDb8xngps2/EC29NAiVLhJNy3OGcupexjYMGxE6tOW/\n\
V+Iy0plQ2tcoSdduXU6GPJ2iKJ5DR/ewhoI6YJ5LNm0PAkEAwwyo61vKu1meU6qt\n\
KTxFiUozA8NC9eFI9+qjzTh7ZavecqhaV46TEWUY4jGTVzYDZaBJxL+S86XwfZQu\n\
hWMqnwJBAIEPMVT/q2R8IsqNWKfoY7cgNUZj8Z/w4E/UJhTzhofzEnhN2MZ30p4C\n\
ThWlTGk58ijveoXyGaWMF6gXf2qUogMCQQCG9eSP7hTKK8mMtOVaSfUHeQrxiJN1\n\
lOurd3Td1D417IVgKrNQMDv85koggRMlXh9dm1pPxAsHggN0sSq7axGbAkB4h3oY\n\
DrHLCdGii6lcmOlDw4lu9kfCHxY6c8jNskqeOXtub7QWMguBJhmbhKEY8PcBTsBU\n\
ftrE734YZMHV+Jkk\n\
-----END PRIVATE KEY-----\n";
const EC_P521: &str = "-----BEGIN PRIVATE KEY-----\n\
MIHuAgEAMBAGByqGSM49AgEGBSuBBAAjBIHWMIHTAgEBBEIAbY6f/ChV2nH1RHoz\n\
kM8ioGJkQCzHQukWNcXawgQrbgr12B5YjpMB8KzgoARm5/CMsNnN1cIBonM1U5Zc\n\
uNEmxL6hgYkDgYYABAG3QhTnRZeQ0G6gtNboZJyWjF7pcoZ/r6APMUgsYeHuqWYF\n\
O0xeQCgNbESigFLoU0pDj3U9u5pTR2cTSSm7AUbKZgHHbmNIr6hifNSrudMhlgN2\n\
siXfReYtTpMFGtxfIxGu5Tu4wHjVtYGVYYoPmFPMTxGjzXRkSpoh1Vf+Pz+T8Je3\n\
9A==\n\
-----END PRIVATE KEY-----\n";

struct World {
    dir: tempfile::TempDir,
    ca: Ca,
    server: Identity,
    client: Identity,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().expect("a folder");
        let ca = Ca::new(dir.path());
        let (server, client) = (ca.issue("server", 1), ca.issue("client", 2));
        World { dir, ca, server, client }
    }

    fn server_files(&self) -> ServerFiles {
        ServerFiles {
            certificate: self.server.certificate.clone(),
            key: self.server.key.clone(),
            client_ca: Some(self.ca.certificate()),
            crl: None,
        }
    }

    fn client_files(&self) -> ClientFiles {
        let identity = Some((self.client.certificate.clone(), self.client.key.clone()));
        ClientFiles { ca: self.ca.certificate(), identity, server_name: None }
    }
}

fn plain(tunnel: &Tunnel) -> UnixStream {
    let stream = UnixStream::from(tunnel.socket.try_clone().expect("a descriptor"));
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// A client's and a server's pump over one socket pair.
struct Link {
    pumps: Pumps,
    client: Tunnel,
    server: Tunnel,
}

impl Link {
    fn new(server: &ServerFiles, client: &ClientFiles) -> Link {
        Link::to("localhost", server, client)
    }

    fn to(host: &str, server: &ServerFiles, client: &ClientFiles) -> Link {
        let (near, far) = UnixStream::pair().expect("a pair");
        let pumps = Pumps::default();
        let tls = Arc::new(ServerTls::load(server).expect("sound files"));
        let server = pumps.serve(far.into(), &tls).expect("a pump");
        let tls = ClientTls::load(client).expect("sound files");
        let client = pumps.connect(near.into(), &tls, host).expect("a pump");
        Link { pumps, client, server }
    }

    /// Sends a word each way and checks that it arrives.
    fn works(&self) {
        for (from, to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            plain(from).write_all(b"word").expect("sent");
            let mut word = [0; 4];
            plain(to).read_exact(&mut word).expect("a word");
            assert_eq!(&word, b"word");
        }
    }

    /// Checks that not a byte gets through, and returns the reason at the server and at the client.
    fn refused(&self) -> (String, String) {
        let _ = plain(&self.client).write_all(b"secret");
        let mut seen = Vec::new();
        let _ = plain(&self.server).read_to_end(&mut seen);
        let _ = plain(&self.client).read_to_end(&mut seen);
        assert_eq!(seen, b"", "nothing gets through");
        assert!(self.pumps.wait(PATIENCE), "the pumps end");
        let why = |tunnel: &Tunnel| tunnel.failure().map(ToString::to_string).unwrap_or_default();
        (why(&self.server), why(&self.client))
    }
}

#[test]
fn megabytes_pass_both_ways_at_once_and_each_half_ends_by_itself() {
    let world = World::new();
    let link = Link::new(&world.server_files(), &world.client_files());
    let bytes: Vec<u8> = (0..20u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::thread::scope(|scope| {
        for (tunnel, reverse) in [(&link.client, false), (&link.server, true)] {
            let want: Vec<u8> = bytes.iter().map(|byte| byte ^ u8::from(!reverse)).collect();
            let send: Vec<u8> = bytes.iter().map(|byte| byte ^ u8::from(reverse)).collect();
            let mut stream = plain(tunnel);
            let mut writing = stream.try_clone().expect("a descriptor");
            scope.spawn(move || {
                writing.write_all(&send).expect("sent");
                writing.shutdown(Shutdown::Write).expect("half closed");
            });
            scope.spawn(move || {
                let mut got = Vec::new();
                stream.read_to_end(&mut got).expect("received");
                assert!(got == want, "what arrived is not what was sent");
            });
        }
    });
    assert!(link.pumps.wait(PATIENCE), "the pumps end");
    assert_eq!((link.client.failure(), link.server.failure()), (None, None));
}

#[test]
fn a_client_that_ends_its_half_still_gets_its_answers() {
    let world = World::new();
    let link = Link::new(&world.server_files(), &world.client_files());
    let (mut client, mut server) = (plain(&link.client), plain(&link.server));
    client.write_all(b"ask").expect("sent");
    client.shutdown(Shutdown::Write).expect("half closed");
    let mut asked = String::new();
    server.read_to_string(&mut asked).expect("the end arrives");
    assert_eq!(asked, "ask");
    server.write_all(&[7; 3 << 20]).expect("answered");
    drop(server);
    let Link { client: tunnel, server, pumps } = link;
    drop(server);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).expect("answered");
    assert!(answer == [7; 3 << 20]);
    drop((client, tunnel));
    assert!(pumps.wait(PATIENCE));
}

/// A peer that has sent everything, goodbye included, still waits for the answers, whatever part of its bytes
/// is in the buffers on the way.
#[test]
fn an_ended_half_arrives_whole_at_a_side_that_takes_its_time() {
    let world = World::new();
    for size in (1..28usize).map(|step| step * (96 << 10)) {
        let link = Link::new(&world.server_files(), &world.client_files());
        link.works();
        let (mut client, mut server) = (plain(&link.client), plain(&link.server));
        let bytes: Vec<u8> =
            (0..size as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        std::thread::scope(|scope| {
            let (mut writing, sent) = (client.try_clone().expect("a descriptor"), &bytes);
            scope.spawn(move || {
                writing.write_all(sent).expect("sent");
                writing.shutdown(Shutdown::Write).expect("half closed");
            });
            // Time enough for a pump to close, wrongly, the half that must stay open.
            let until = Instant::now() + Duration::from_millis(20);
            while Instant::now() < until && link.server.failure().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut got = Vec::new();
            let end = server.read_to_end(&mut got);
            assert_eq!((end.ok(), link.server.failure()), (Some(size), None), "of {size} bytes");
            assert!(got == bytes, "what arrived is not what was sent");
        });
        server.write_all(b"answer").expect("answered");
        server.shutdown(Shutdown::Write).expect("half closed");
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("answered");
        assert_eq!(answer, "answer");
        assert!(link.pumps.wait(PATIENCE), "the pumps end");
        assert_eq!((link.client.failure(), link.server.failure()), (None, None));
    }
}

#[test]
fn peers_must_prove_who_they_are() {
    let world = World::new();
    Link::new(&world.server_files(), &world.client_files()).works();
    Link::to("::1", &world.server_files(), &world.client_files()).works();
    let named = ClientFiles { server_name: Some("localhost".into()), ..world.client_files() };
    Link::to("10.0.0.1", &world.server_files(), &named).works();
    let anybody = ServerFiles { client_ca: None, ..world.server_files() };
    let nobody = ClientFiles { identity: None, ..world.client_files() };
    Link::new(&anybody, &nobody).works();

    let other = Ca::new(&world.dir.path().join("other"));
    let stranger = other.issue("client", 2);
    let as_stranger = ClientFiles {
        identity: Some((stranger.certificate.clone(), stranger.key.clone())),
        ..world.client_files()
    };
    let expired = world.ca.issue_until("late", 3, 2021);
    let as_expired = ServerFiles { client_ca: Some(world.ca.certificate()), ..world.server_files() };
    let (server, client) = Link::new(&world.server_files(), &nobody).refused();
    assert!(server.contains("no certificates"), "{server}");
    assert!(client.contains("CertificateRequired"), "{client}");
    let (server, _) = Link::new(&world.server_files(), &as_stranger).refused();
    assert!(server.contains("UnknownIssuer"), "{server}");
    let distrusting = ClientFiles { ca: other.certificate(), ..world.client_files() };
    let (server, client) = Link::new(&world.server_files(), &distrusting).refused();
    assert!(client.contains("UnknownIssuer"), "{client}");
    assert!(server.contains("UnknownCA"), "{server}");
    let (_, client) = Link::to("elsewhere.example", &world.server_files(), &world.client_files()).refused();
    assert!(client.contains("elsewhere.example"), "{client}");
    // A certificate of this host that has expired is not even loaded.
    let files = ServerFiles { certificate: expired.certificate, key: expired.key, ..as_expired };
    let error = ServerTls::load(&files).expect_err("expired").to_string();
    assert!(
        error.contains("late-cert.pem") && error.contains("expired") && error.contains("days"),
        "{error}"
    );
}

#[test]
fn revoked_certificates_are_refused_also_after_a_reload() {
    let world = World::new();
    let crl = world.ca.revoke(&[77]);
    let files = ServerFiles { crl: Some(crl), ..world.server_files() };
    Link::new(&files, &world.client_files()).works();
    let tls = Arc::new(ServerTls::load(&files).expect("sound files"));
    let link_with = |tls: &Arc<ServerTls>| {
        let (near, far) = UnixStream::pair().expect("a pair");
        let pumps = Pumps::default();
        let server = pumps.serve(far.into(), tls).expect("a pump");
        let client = ClientTls::load(&world.client_files()).expect("sound files");
        let client = pumps.connect(near.into(), &client, "localhost").expect("a pump");
        Link { pumps, client, server }
    };
    let before = link_with(&tls);
    before.works();
    let peer = Arc::clone(before.server.peer().get().expect("it proved who it is"));
    assert_eq!(peer.names().subject, "CN=client");
    world.ca.revoke(&[77, 2]);
    link_with(&tls).works();
    tls.trusts(&peer).expect("the files were not read again");
    tls.renew(&ServerTls::load(&files).expect("sound files"));
    let (server, _) = link_with(&tls).refused();
    assert!(server.contains("Revoked"), "{server}");
    // Its pump goes on; the caller that renewed the files decides about it.
    before.works();
    let why = tls.trusts(&peer).expect_err("revoked").to_string();
    assert!(why.contains("Revoked"), "{why}");
    // A bad file changes nothing.
    fs::write(&files.certificate, "nonsense").expect("written");
    let error = ServerTls::load(&files).expect_err("no certificate").to_string();
    assert!(error.contains("server-cert.pem: holds no certificate"), "{error}");
    world.ca.revoke(&[]);
    let (server, _) = link_with(&tls).refused();
    assert!(server.contains("Revoked"), "the old configuration is whole: {server}");
}

/// A client whose certificate is revoked between its handshake's beginning and end is not let in by
/// the old list.
#[test]
fn a_handshake_that_a_revocation_overtakes_is_refused() {
    let world = World::new();
    let crl = world.ca.revoke(&[]);
    let files = ServerFiles { crl: Some(crl), ..world.server_files() };
    let tls = Arc::new(ServerTls::load(&files).expect("sound files"));
    let (near, far) = UnixStream::pair().expect("a pair");
    let pumps = Pumps::default();
    let server = pumps.serve(far.into(), &tls).expect("a pump");
    world.ca.revoke(&[2]);
    tls.renew(&ServerTls::load(&files).expect("sound files"));
    let client = ClientTls::load(&world.client_files()).expect("sound files");
    let client = pumps.connect(near.into(), &client, "localhost").expect("a pump");
    let (server, _) = Link { pumps, client, server }.refused();
    assert!(server.contains("Revoked"), "{server}");
}

#[test]
fn what_expires_later_ends_nothing_that_began_before() {
    let world = World::new();
    let link = Link::new(&world.server_files(), &world.client_files());
    link.works();
    let peer = Arc::clone(link.server.peer().get().expect("it proved who it is"));
    let tls = ServerTls::load(&world.server_files()).expect("sound files");
    let at = |seconds| Peer::at(&peer, seconds);
    // The certificate is valid from 2020 until 2090.
    tls.trusts(&at(1_700_000_000)).expect("valid then");
    assert!(tls.trusts(&at(1_500_000_000)).is_err() && tls.trusts(&at(4_000_000_000)).is_err());
}

#[test]
fn a_ca_that_has_expired_vouches_for_nobody() {
    let world = World::new();
    let old = Ca::new_until(&world.dir.path().join("old"), 2021);
    let client = old.issue("client", 2);
    let pem = |ca: &Ca| fs::read_to_string(ca.certificate()).expect("a certificate");
    let both = world.dir.path().join("both.pem");
    fs::write(&both, pem(&old) + &pem(&world.ca)).expect("written");
    let of_old = ClientFiles { identity: Some((client.certificate, client.key)), ..world.client_files() };
    for (ca, is_let_in) in [(&both, true), (&old.certificate(), false)] {
        let files = ServerFiles { client_ca: Some(ca.clone()), ..world.server_files() };
        if is_let_in {
            Link::new(&files, &world.client_files()).works();
        }
        let (server, _) = Link::new(&files, &of_old).refused();
        assert!(server.contains("expired"), "{server}");
    }
    let server = old.issue("server", 3);
    let of_old = ServerFiles { certificate: server.certificate, key: server.key, ..world.server_files() };
    let trusting = ClientFiles { ca: both, ..world.client_files() };
    Link::new(&world.server_files(), &trusting).works();
    let (_, client) = Link::new(&of_old, &trusting).refused();
    assert!(client.contains("expired"), "{client}");
}

#[test]
fn certificates_tell_when_they_end() {
    let world = World::new();
    let facts = world.server_files().certificates().expect("sound files");
    let told: Vec<_> = facts.iter().map(|facts| (facts.role, facts.subject.as_str())).collect();
    assert_eq!(told[0], (FileRole::Certificate, "CN=server"));
    assert!(told[1].0 == FileRole::Ca && told[1].1.starts_with("CN=test CA"), "{told:?}");
    assert!(facts.iter().all(|facts| facts.not_after_unix == 3_786_912_000), "2090-01-01: {facts:?}");
    let soon = world.ca.issue_for_days("soon", 9, 5);
    let files = ServerFiles { certificate: soon.certificate, key: soon.key, ..world.server_files() };
    let end = files.certificates().expect("sound files")[0].not_after_unix;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock").as_secs();
    assert!((now + 5 * 86_400 + 43_200).abs_diff(end) < 60, "{end}");
    let facts = world.client_files().certificates().expect("sound files");
    assert_eq!(
        facts.iter().map(|facts| facts.role).collect::<Vec<_>>(),
        [FileRole::Certificate, FileRole::Ca]
    );
}

#[test]
fn every_unusable_file_is_named_with_what_is_wrong() {
    let world = World::new();
    let dir = world.dir.path();
    let put = |name: &str, bytes: &[u8], mode: u32| {
        fs::write(dir.join(name), bytes).expect("written");
        fs::set_permissions(dir.join(name), fs::Permissions::from_mode(mode)).expect("ours");
        dir.join(name)
    };
    let key = fs::read(&world.server.key).expect("ours");
    let certificate = fs::read_to_string(&world.server.certificate).expect("ours");
    let damaged = certificate.replacen("MII", "!!!", 1);
    let short = certificate.replace("-----END CERTIFICATE-----", "");
    let later = "-----BEGIN CERTIFICATE-----\nMAAA\n-----END CERTIFICATE-----\n";
    let good = world.server_files();
    let with_key = |key: &Path| ServerFiles { key: key.into(), ..world.server_files() };
    let with_certificate =
        |certificate: &Path| ServerFiles { certificate: certificate.into(), ..world.server_files() };
    let with_ca = |ca: &Path| ServerFiles { client_ca: Some(ca.into()), ..world.server_files() };
    let other = Ca::new(&world.dir.path().join("other"));
    let with_crl = |crl: &Path| ServerFiles { crl: Some(crl.into()), ..world.server_files() };
    let encrypted = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let rfc1421 =
        b"-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\nAAAA\n\
                    -----END EC PRIVATE KEY-----\n";
    let cases = [
        (with_key(&world.client.key), FileRole::Key, "client-key.pem: the key does not belong to"),
        (with_key(&put("open.pem", &key, 0o644)), FileRole::Key, "open.pem: the key has mode 0644"),
        (with_key(&put("secret.pem", encrypted, 0o600)), FileRole::Key, "encrypted with a passphrase"),
        (with_key(&put("old.pem", rfc1421, 0o600)), FileRole::Key, "old.pem -out NEW'), and name that file"),
        (
            with_key(&put("small.pem", RSA_1024.as_bytes(), 0o600)),
            FileRole::Key,
            "small.pem: the key is an RSA key of 1024 bits, which cannot be used here: use RSA of 2048, 3072 or 4096 bits,",
        ),
        (
            with_key(&put("curve.pem", EC_P521.as_bytes(), 0o600)),
            FileRole::Key,
            "key with the curve P-521, which",
        ),
        (with_key(&good.certificate), FileRole::Key, "holds no private key in PEM form"),
        (with_key(&dir.join("none.pem")), FileRole::Key, "none.pem: cannot be read: No such file"),
        (with_key(dir), FileRole::Key, "cannot be read: it is a directory, not a file"),
        (with_certificate(&good.key), FileRole::Certificate, "server-key.pem: holds no certificate"),
        (with_certificate(&put("x", damaged.as_bytes(), 0o644)), FileRole::Certificate, "is not sound PEM"),
        (with_certificate(&put("y", short.as_bytes(), 0o644)), FileRole::Certificate, "is missing"),
        (with_ca(&good.key), FileRole::Ca, "server-key.pem: holds no certificate"),
        (with_ca(&put("z", later.as_bytes(), 0o644)), FileRole::Ca, "z: certificate 1 cannot be trusted"),
        (with_crl(&good.certificate), FileRole::Crl, "holds no certificate revocation list"),
        (with_crl(&other.revoke(&[])), FileRole::Crl, "holds no revocation list of a CA in"),
    ];
    fs::set_permissions(&good.certificate, fs::Permissions::from_mode(0o600)).expect("ours");
    for (files, role, text) in cases {
        let error = ServerTls::load(&files).expect_err(text);
        assert_eq!(error.role, role, "{error}");
        assert!(error.to_string().contains(text), "{error}");
        assert!(!format!("{error:?}").contains("BEGIN"), "{error:?}");
    }
    put("group.pem", &key, 0o640);
    ServerTls::load(&with_key(&dir.join("group.pem"))).expect("a group may be trusted");
    let name = ClientFiles { server_name: Some("no name".into()), ..world.client_files() };
    let tls = ClientTls::load(&name).expect("sound files");
    let (near, _far) = UnixStream::pair().expect("a pair");
    let error = Pumps::default().connect(near.into(), &tls, "h").expect_err("no name").to_string();
    assert!(error.contains("'no name' is neither"), "{error}");
}

/// A server's pump with a raw socket in place of the network.
fn raw_server(world: &World) -> (UnixStream, Tunnel, Pumps) {
    let (near, far) = UnixStream::pair().expect("a pair");
    near.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let pumps = Pumps::default();
    let tls = Arc::new(ServerTls::load(&world.server_files()).expect("sound files"));
    let server = pumps.serve(far.into(), &tls).expect("a pump");
    (near, server, pumps)
}

#[test]
fn garbage_and_plain_text_are_refused_and_nothing_of_them_gets_through() {
    let world = World::new();
    let plain_nbd = [b"IHAVEOPT\0\0\0\x07\0\0\0\0".to_vec(), vec![0x55; 100 << 10], vec![0x16; 100 << 10]];
    for garbage in plain_nbd {
        let (mut raw, server, pumps) = raw_server(&world);
        let _ = raw.write_all(&garbage);
        let mut seen = Vec::new();
        plain(&server).read_to_end(&mut seen).expect("the end");
        assert_eq!(seen, b"");
        assert!(pumps.wait(PATIENCE));
        let failure = server.failure().expect("a reason").to_string();
        assert!(failure.contains("handshake failed"), "{failure}");
    }
}

#[test]
fn a_peer_that_leaves_in_the_handshake_or_never_finishes_it_costs_nothing() {
    let world = World::new();
    let (raw, server, pumps) = raw_server(&world);
    drop(raw);
    assert!(pumps.wait(PATIENCE));
    assert_eq!(server.failure(), Some(&TlsFailure::HandshakeClosed));
    // A record that never ends; the plain side gives up.
    let (mut raw, server, pumps) = raw_server(&world);
    raw.write_all(&[0x16, 3, 1, 2, 0, 1]).expect("sent");
    drop(server);
    assert!(pumps.wait(Duration::from_secs(1)), "the pump ends with its plain side");
    // No side gives up: the pump does.
    let (raw, server, pumps) = raw_server(&world);
    assert!(!pumps.wait(Duration::from_secs(8)));
    assert!(pumps.wait(Duration::from_secs(4)));
    assert_eq!(server.failure(), Some(&TlsFailure::HandshakeOverdue));
    drop(raw);
}

/// Carries bytes between the network ends of two pumps until told to stop.
struct Wire {
    client: Tunnel,
    server: Tunnel,
    pumps: Pumps,
    near: UnixStream,
    far: UnixStream,
}

impl Wire {
    /// Two pumps with a gap in between, past the handshake.
    fn new(world: &World) -> Wire {
        let (near, client_end) = UnixStream::pair().expect("a pair");
        let (far, server_end) = UnixStream::pair().expect("a pair");
        let pumps = Pumps::default();
        let tls = Arc::new(ServerTls::load(&world.server_files()).expect("sound files"));
        let server = pumps.serve(server_end.into(), &tls).expect("a pump");
        let tls = ClientTls::load(&world.client_files()).expect("sound files");
        let client = pumps.connect(client_end.into(), &tls, "localhost").expect("a pump");
        for stream in [&near, &far] {
            stream.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
        }
        let mut wire = Wire { client, server, pumps, near, far };
        plain(&wire.client).write_all(b"hello").expect("sent");
        wire.carry(|bytes| bytes.to_vec());
        let mut hello = [0; 5];
        plain(&wire.server).read_exact(&mut hello).expect("through");
        wire
    }

    /// Carries bytes both ways until both sides are silent, and changes those that the client sent.
    fn carry(&mut self, change: impl Fn(&[u8]) -> Vec<u8>) {
        let mut buf = vec![0; 64 << 10];
        loop {
            let up = self.near.read(&mut buf).unwrap_or(0);
            let _ = self.far.write_all(&change(&buf[..up]));
            let down = self.far.read(&mut buf).unwrap_or(0);
            let _ = self.near.write_all(&buf[..down]);
            if up == 0 && down == 0 {
                return;
            }
        }
    }
}

#[test]
fn a_stream_that_is_cut_ends_the_plain_side_with_what_was_whole() {
    let world = World::new();
    let mut wire = Wire::new(&world);
    plain(&wire.client).write_all(b"whole").expect("sent");
    wire.carry(|bytes| bytes.to_vec());
    plain(&wire.client).write_all(b"half").expect("sent");
    let mut buf = [0; 1024];
    let count = wire.near.read(&mut buf).expect("a record");
    wire.far.write_all(&buf[..count / 2]).expect("half a record");
    wire.far.shutdown(Shutdown::Both).expect("cut");
    let mut seen = Vec::new();
    plain(&wire.server).read_to_end(&mut seen).expect("the end");
    assert_eq!(seen, b"whole");
    drop((wire.near, wire.far));
    assert!(wire.pumps.wait(PATIENCE));
    assert!(
        matches!(wire.server.failure(), Some(TlsFailure::Truncated | TlsFailure::Lost(_))),
        "{:?}",
        wire.server.failure()
    );
}

#[test]
fn a_changed_byte_ends_the_connection_and_is_not_delivered() {
    let world = World::new();
    let mut wire = Wire::new(&world);
    plain(&wire.client).write_all(b"precious").expect("sent");
    wire.carry(|bytes| {
        let mut bytes = bytes.to_vec();
        if let Some(last) = bytes.last_mut() {
            *last ^= 1;
        }
        bytes
    });
    let mut seen = Vec::new();
    plain(&wire.server).read_to_end(&mut seen).expect("the end");
    assert_eq!(seen, b"");
    assert!(matches!(wire.server.failure(), Some(TlsFailure::Stream(_))), "{:?}", wire.server.failure());
}

#[test]
fn back_pressure_passes_through_and_a_lost_peer_is_told_although_nobody_reads() {
    let world = World::new();
    let link = Link::new(&world.server_files(), &world.client_files());
    link.works();
    let client = plain(&link.client);
    client.set_nonblocking(true).expect("ours");
    let mut taken = 0u64;
    let begun = Instant::now();
    // The server's side reads nothing: the client's is stopped after the buffers on the way.
    while begun.elapsed() < Duration::from_secs(2) {
        match (&client).write(&[9; 64 << 10]) {
            Ok(count) => taken += count as u64,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
    assert!((64 << 10..12 << 20).contains(&taken), "{taken} bytes are on their way");
    assert!((&client).write(&[9; 64 << 10]).is_err(), "still stopped");
    let server = plain(&link.server);
    let hung_up = |patience: u16| {
        let mut fds = [PollFd::new(server.as_fd(), PollFlags::empty())];
        poll(&mut fds, PollTimeout::from(patience)).expect("polled") == 1
    };
    assert!(!hung_up(200), "a slow peer is not a lost one");
    // The client's process ends.
    let Link { client: tunnel, server: at_server, pumps } = link;
    client.shutdown(Shutdown::Both).expect("ours");
    drop((client, tunnel));
    assert!(hung_up(5000), "the plain side learns of it");
    assert!(pumps.wait(Duration::from_secs(5)), "the pumps end");
    let mut rest = Vec::new();
    (&server).read_to_end(&mut rest).expect("what was delivered stays");
    assert!(!rest.is_empty() && rest.len() as u64 <= taken && rest.iter().all(|&byte| byte == 9));
    drop(at_server);
}

#[test]
fn a_peer_that_never_reads_cannot_keep_a_pump_whose_plain_side_is_gone() {
    let world = World::new();
    let wire = Wire::new(&world);
    let server = plain(&wire.server);
    server.set_nonblocking(true).expect("ours");
    for _ in 0..200 {
        let _ = (&server).write(&[1; 64 << 10]);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(wire.pumps.running(), 2);
    let Wire { client, server: tunnel, pumps, near, far } = wire;
    drop((server, tunnel, client));
    assert!(pumps.wait(Duration::from_secs(8)), "the pumps end");
    drop((near, far));
}

#[test]
fn a_goodbye_is_told_although_nobody_reads_what_came_before_it() {
    let world = World::new();
    let link = Link::new(&world.server_files(), &world.client_files());
    link.works();
    assert!(!link.server.goodbye().was_said());
    let mut client = plain(&link.client);
    client.write_all(&[7; 4096]).expect("sent");
    client.shutdown(Shutdown::Write).expect("half closed");
    let begun = Instant::now();
    while !link.server.goodbye().was_said() {
        assert!(begun.elapsed() < PATIENCE, "nobody was told");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!link.client.goodbye().was_said(), "the other half goes on");
    let mut got = Vec::new();
    plain(&link.server).read_to_end(&mut got).expect("received");
    assert_eq!(got, [7; 4096]);
}
